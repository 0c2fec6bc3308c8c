"""A trained model for new records: `load_run` in Python, `sordino predict` on the command line, by one path.

`sordino.load` reads data, so what reads a finished run has another name.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from sordino.data import tables
from sordino.data.arrays import check_features
from sordino.data.preprocess import preprocess
from sordino.data.readers import columns_of, text_column
from sordino.data.schema import Schema
from sordino.data.sources import encode_file, read_features
from sordino.data.text import before, tokenize
from sordino.errors import SordinoError
from sordino.evidence.signing import broken, sha256
from sordino.models import registry
from sordino.models.hazards import Hazards
from sordino.models.registry import BuiltModel
from sordino.training import language
from sordino.training.artifacts import load_model
from sordino.training.folder import RunFolder
from sordino.training.verify_run import read_certificate

Records: TypeAlias = Any  # the path of a file, a dict of columns, a frame of pandas, polars or pyarrow, or an array
FRAME_ATTRIBUTES = ("iloc", "to_arrow", "column_names")  # of pandas, polars and pyarrow


class Predictions(NamedTuple):
    labels: list[Any]  # or values, where labels are numbers; of survival, the risk of the event by the last edge; texts
    classes: list[str]  # what the columns of `probabilities` are of: classes, or "no event by EDGE"
    probabilities: list[list[float]]


@dataclass(frozen=True)
class LoadedRun:
    """A trained model with everything that it needs to read new records. `load_run` makes it.

    Records are a file, a frame (pandas, polars, pyarrow, or a dict of columns) or an array. Columns of files and frames
    are found by name, whatever their order, and absent ones are refused. The columns of an array are `features`, in
    that order: with a schema, these are the encoded features and not the columns of the table.

    Attributes:
      model: the model.
      theta: its parameters, one vector.
      classes: the labels, in the order of `predict_proba`; empty where labels are numbers.
      features: names of the features, in order; empty where the model was trained on an array without names.
      schema: the public schema of the table that it was trained on; None where there was none.
      certificate: the content of the certificate.json beside the model, checked; None where there is none.
      normalize: how each record is scaled (`sordino.data.preprocess`): part of the model.
      public: public mean and covariance that records are whitened by; None where there are none.
      about: all that the file of the model says of it.
    """

    model: BuiltModel
    theta: Tensor
    classes: tuple[str, ...]
    features: tuple[str, ...]
    schema: Schema | None
    certificate: dict[str, Any] | None
    normalize: str
    public: tuple[np.ndarray, np.ndarray] | None
    about: dict[str, Any]

    def encode(self, records: Records) -> np.ndarray:
        """The features of records before they are scaled: float32, records by features.

        Raises:
          SordinoError: a column is absent, or a value cannot be read.
        """
        count = int(self.about["features"])
        if self.writes and self._is_text(records):
            return language.rows(count, self._tokenizer, *self._learned(records))
        if self._is_text(records):
            lines = self._texts(Path(records)) if isinstance(records, str | Path) else list(records)
            return np.asarray(tokenize(lines, count, self._tokenizer), np.float32)
        if isinstance(records, str | Path):
            file = str(records)
            if self.schema is not None:
                return encode_file(file, self.schema)
            return read_features(file, self.features, count)
        if isinstance(records, Mapping) or any(hasattr(records, name) for name in FRAME_ATTRIBUTES):
            if self.schema is not None:
                return self.schema.encode(records, target=False).x
            return columns_of(tables.of_frame(records), self.features, count, "the frame")
        x = check_features(np.asarray(records), "x", self.features or None)
        if x.shape[1] != count:
            encoded = " encoded" if self.schema is not None else ""
            remedy = "; give a frame, whose columns are found by name" if self.schema is not None else ""
            raise SordinoError(f"x: {x.shape[1]} features, the model was trained on {count}{encoded} ones{remedy}.")
        return x

    def prepare(self, records: Records) -> Tensor:
        """What the model reads: encoded features, scaled record by record."""
        x = self.encode(records)
        if not self._is_text(records):  # token ids are not amounts
            x = preprocess(x, None if self.schema is not None else self.public, self.normalize)
        return torch.from_numpy(x).to(self.theta)

    def _texts(self, path: Path, field: str = "text") -> list[str]:
        """The lines of a text file, or the column of a table that the run was trained on. field: of the run."""
        name = tomllib.loads(self.about["spec"]).get(field)
        if name is None or tables.suffix_of(path) not in tables.SUFFIXES:
            return sentences(str(path))
        return text_column(tables.open_table(path, spelt=[str(name)]), str(name), path, field)

    @property
    def writes(self) -> bool:
        """Whether it is a causal language model, which has no labels and writes text."""
        return registry.entry(self.about["kind"]).causal

    @property
    def _prompted(self) -> bool:
        """Whether it learned texts after prompts."""
        return "prompt" in tomllib.loads(self.about["spec"])

    def _learned(self, records: Records) -> tuple[list[str], ...]:
        """Texts as they are learned; with their prompts, where a table has them."""
        if not isinstance(records, str | Path):
            return (list(records),)
        path = Path(records)
        whole = self._prompted and tables.suffix_of(path) in tables.SUFFIXES
        return self._texts(path), *([self._texts(path, "prompt")] if whole else [])

    def generate(self, prompts: Records, *, most: int = 40, temperature: float = 0.0, seed: int = 0) -> list[str]:
        """What the model writes after each prompt. It costs no privacy, because it reads the model alone.

        Args:
          prompts: a list of texts, a text file with one per line, or a table with the column of training: that of
            prompts if there was one, else that of texts.
          most: new tokens at most.
          temperature: 0 takes the most probable token; above 0 tokens are drawn.
          seed: of the draws.

        Returns:
          One text per prompt.

        Raises:
          SordinoError: the model writes no text, a prompt has no token, or an argument is out of its range.
        """
        if not self.writes:
            raise SordinoError(f"prompt: {self.about['kind']} writes no text; use predict, or a model causal-lora.")
        if isinstance(prompts, str | Path):
            lines = self._texts(Path(prompts), "prompt" if self._prompted else "text")
        elif isinstance(prompts, list | tuple) and all(isinstance(line, str) for line in prompts):
            lines = list(prompts)
        else:
            raise SordinoError(f"prompts: a {type(prompts).__name__}; give a list of texts, or the path of a file.")
        lines = [before(line) for line in lines] if self._prompted else lines
        how: Any = {"most": most, "temperature": temperature, "seed": seed}
        return language.write(self.model, self.theta, self._tokenizer, lines, **how)

    @property
    def _tokenizer(self) -> str:
        """The tokenizer of the weights' folder, as in training."""
        weights = json.loads(self.about["model"]["options"]).get("weights")
        return weights if weights and Path(weights).is_dir() else "minilm"

    def _is_text(self, records: Records) -> bool:
        """Whether these are sentences: a text file, or a list of them."""
        if registry.entry(self.about["kind"]).reads != "text":
            return False
        if isinstance(records, str | Path):
            return not str(records).endswith(".npz")
        return isinstance(records, list | tuple) and all(isinstance(line, str) for line in records)

    def predict(self, records: Records) -> np.ndarray:
        """The predicted class of each record, by its name and by the run's threshold; or a number, for such labels.

        Of survival it is the risk: the probability that the event happens before the last edge. A causal language model
        writes a text (`generate`).

        Raises:
          SordinoError: a column is absent, or a value cannot be read.
        """
        if self.writes:
            return np.asarray(self.generate(records))
        x = self.prepare(records)
        if self.classes:
            return np.asarray(np.asarray(self.classes)[self._class_index(x)])
        return self._in_its_unit(self.model.predict(self.theta, x).cpu().numpy())

    @property
    def threshold(self) -> float:
        """The run's threshold for two classes: above this probability the second one is predicted."""
        return float(tomllib.loads(self.about["spec"]).get("threshold", 0.5))

    def _class_index(self, x: Tensor) -> np.ndarray:
        if len(self.classes) != 2 or self.threshold == 0.5:
            return np.asarray(self.model.predict(self.theta, x).cpu().numpy())
        return np.asarray((self.model.scores(self.theta, x)[:, 1] > self.threshold).long().cpu().numpy())

    def _in_its_unit(self, numbers: np.ndarray) -> np.ndarray:
        return np.asarray(numbers) if self.schema is None else self.schema.to_people(numbers)

    def predict_proba(self, records: Records) -> np.ndarray:
        """The probability of each class, records by classes, in the order of `classes`.

        Raises:
          SordinoError: labels are numbers, a column is absent, or a value cannot be read.
        """
        if isinstance(self.model, Hazards):
            raise SordinoError("predict_proba: the model predicts survival, not classes; use predict_survival.")
        if self.writes:
            raise SordinoError("predict_proba: the model writes text, which has no classes; use generate.")
        if not self.classes:
            raise SordinoError("predict_proba: the model predicts numbers, which have no probabilities; use predict.")
        return np.asarray(self.model.scores(self.theta, self.prepare(records)).cpu().numpy())

    @property
    def edges(self) -> tuple[float, ...]:
        """The ends of the public intervals of a survival model; empty for other tasks."""
        return self.model.intervals[1:] if isinstance(self.model, Hazards) else ()

    def predict_survival(self, records: Records) -> np.ndarray:
        """The probability that the event has not happened by each of `edges`: records by edges.

        Raises:
          SordinoError: the model is not a survival model, a column is absent, or a value cannot be read.
        """
        if not isinstance(self.model, Hazards):
            raise SordinoError("predict_survival: the model does not predict survival; use predict.")
        return np.asarray(self.model.scores(self.theta, self.prepare(records)).cpu().numpy())

    def predictions(self, records: Records) -> Predictions:
        """Labels and probabilities from one preparation of the records."""
        if self.writes:
            return Predictions(self.generate(records), [], [])
        x = self.prepare(records)
        predicted = self.model.predict(self.theta, x)
        if isinstance(self.model, Hazards):
            curves = self.model.scores(self.theta, x).tolist()
            return Predictions(predicted.tolist(), [f"no event by {edge:g}" for edge in self.edges], curves)
        if not self.classes:
            return Predictions(self._in_its_unit(predicted.cpu().numpy()).tolist(), [], [])
        return Predictions(
            [self.classes[k] for k in self._class_index(x)],
            list(self.classes),
            self.model.scores(self.theta, x).tolist(),
        )


def load_run(path: str | Path, *, weights: str | Path | None = None) -> LoadedRun:
    """Read the model of a finished run, with its schema and its certificate.

    The model is compared with the certificate beside it: another model than the certified one is refused. The name is
    not `load`, because `sordino.load` reads data.

    Args:
      path: the directory of a run, its public/, or a model.safetensors.
      weights: of a transformer, the folder that it was trained from; by default the path in the run's private part.

    Returns:
      The model, with `predict`, `predict_proba`, `schema`, `certificate`, `model`, `theta`, `features` and `classes`.

    Raises:
      SordinoError: there is no model, it is not the one that the certificate names, the signature does not hold, or
        the folder of weights is not at hand or is another one.

    Example:
      >>> import sordino
      >>> from sordino.training import run  # what `sordino run --out mine` does
      >>> out, prepared = Path("mine"), run.prepare(run.Spec(method="dp-fedgd", rounds=3))
      >>> run.start(prepared, out)
      >>> certificate = run.finish(prepared, out, list(run.rounds(prepared, out)))
      >>> mine = sordino.load_run("mine")
      >>> mine.certificate["certified"], mine.classes[:3]
      (True, ('0', '1', '2'))
      >>> mine.predict_proba(sordino.load("digits").x_test[:2]).shape
      (2, 10)
    """
    path = Path(path)
    path = RunFolder.find(path).named(path, "model.safetensors")
    cert = check_model(path)
    model, theta, about, public = load_model(path, weights)
    schema = Schema.of(about["schema"]) if about.get("schema") else None
    return LoadedRun(
        model=model,
        theta=theta,
        classes=tuple(about["classes"]),
        features=tuple(about["columns"]),
        schema=schema,
        certificate=cert,
        normalize=about["normalize"],
        public=public,
        about=about,
    )


def predict(model: str | Path, file: str) -> Predictions:
    """Predict the label of every record in a file.

    Args:
      model: the directory of a run, its public/, or a model.safetensors.
      file: a table with the columns of training, an .npz with x, or a text file for models that read text.
    """
    return load_run(model).predictions(file)


def check_model(path: Path) -> dict[str, Any] | None:
    """Refuse a model that is not the one that the certificate beside it names. Returns the certificate."""
    beside = path.with_name("certificate.json")
    if not path.is_file() or not beside.is_file():
        return None
    cert = read_certificate(beside)
    if "signature" in cert and (why := broken(cert)):
        raise SordinoError(f"model: of the certificate beside '{path}', {why}; get both from their source again.")
    if (known := cert.get("model_sha256")) and sha256(path) != known:
        raise SordinoError(
            f"model: '{path}' is not the model that the certificate beside it was made for; it was damaged or "
            "exchanged. Get it from its source again."
        )
    return cert


def sentences(file: str) -> list[str]:
    """The lines of a text file: one sentence per line, without a heading and without labels."""
    if Path(file).suffix.lower() in (".csv", ".tsv", ".parquet"):
        raise SordinoError(
            f"data: '{file}' is a table; give a text file with one sentence per line, or token ids as an .npz."
        )
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SordinoError(
            f"data: '{file}' cannot be read ({error}); give a text file with one sentence per line."
        ) from None
    if not lines:
        raise SordinoError(f"data: '{file}' is empty; give a text file with one sentence per line.")
    return lines
