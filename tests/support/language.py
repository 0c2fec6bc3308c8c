"""Tiny models of language on disk, in the format that `save_pretrained` writes, and small texts."""

import pytest

WORDS = ("good", "bad", "fine", "dull", "warm", "cold", "film", "the", "a", "was", "not", "very", "and", "it")
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def tokenizer(folder, kind="roberta"):
    """A word-level tokenizer.json with the special tokens of RoBERTa or GPT-2."""
    tokenizers = pytest.importorskip("tokenizers", reason="pip install sordino[transformers]")
    special = ("<s>", "<pad>", "</s>", "<unk>") if kind == "roberta" else ("<|endoftext|>",)
    vocabulary = {word: k for k, word in enumerate((*special, *WORDS))}
    engine = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=special[-1]))
    engine.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    if kind == "roberta":
        engine.post_processor = tokenizers.processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    engine.save(str(folder / "tokenizer.json"))
    return len(vocabulary)


def roberta(folder, classes=2):
    """A RoBERTa of one layer."""
    transformers = pytest.importorskip("transformers", reason="pip install sordino[transformers]")
    import torch

    torch.manual_seed(0)
    config = transformers.RobertaConfig(
        vocab_size=tokenizer(folder), max_position_embeddings=20, type_vocab_size=1, num_labels=classes, **SIZES
    )
    transformers.RobertaForSequenceClassification(config).save_pretrained(folder)
    return folder


def reviews(path, n=40):
    """A table of reviews in which one word decides the label."""
    lines = ["id,body,stars,clinic"]
    for k in range(n):
        word = ("bad", "good")[k % 2]
        lines.append(
            f'{k},"the film was {"very " * (k % 3)}{word}, and it was {WORDS[k % 4 + 2]}",{1 + 4 * (k % 2)},{k % 3}'
        )
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def answers(path, n=40):
    """A table of questions and answers of three clinics."""
    lines = ["id,question,answer,clinic"]
    for k in range(n):
        word, more = WORDS[k % 4], WORDS[(3 * k) % 5]
        lines.append(f"{k},the film was {'not' if k % 2 else 'very'} {more},it was {word} and {more},{k % 3}")
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def gpt2(folder, layers=1, width=16):
    """A GPT-2 of one layer, in the format of the published one."""
    transformers = pytest.importorskip("transformers", reason="pip install sordino[transformers]")
    import torch

    torch.manual_seed(0)
    size = tokenizer(folder, "gpt2")
    config = transformers.GPT2Config(
        vocab_size=size, n_positions=32, n_embd=width, n_layer=layers, n_head=2, bos_token_id=0, eos_token_id=0
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def fused(folder, family):
    """A causal language model of a family that has one layer for queries, keys and values."""
    transformers = pytest.importorskip("transformers", reason="pip install sordino[transformers]")
    import torch

    torch.manual_seed(0)
    folder.mkdir()
    more = {"n_layer": 1, "n_head": 2} if family == "bloom" else {"max_position_embeddings": 32} | SIZES
    config = transformers.AutoConfig.for_model(
        family, **({"hidden_size": 16, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0} | more)
    )
    config.vocab_size = tokenizer(folder, "gpt2")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def mixtral(folder, **more):
    """A mixture of experts, whose router sends each token to two of four experts."""
    transformers = pytest.importorskip("transformers", reason="pip install sordino[transformers]")
    import torch

    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=tokenizer(folder, "gpt2"),
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=32,
        pad_token_id=0,
        eos_token_id=0,
        **(SIZES | more),
    )
    transformers.MixtralForCausalLM(config).save_pretrained(folder)
    return folder
