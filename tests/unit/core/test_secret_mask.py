"""Masks: no secret is left in a command line, and what explains a run stays."""

from __future__ import annotations

import pytest

from rankdump._recorder.run_card_recorder import MASK, mask_arguments, mask_value

SECRETS = [
    ["--api-key=hunter2"],
    ["--api-key", "hunter2"],
    ["--hub_token", "hunter2"],
    ["--password", "12345"],
    ["--pwd=12345"],
    ["-token", "hunter2"],
    ["trainer.hub.token=hunter2"],
    ["+wandb.api_key=hunter2"],
    ["WANDB_API_KEY=hunter2"],
    ["--aws-secret-access-key", "hunter2"],
    ["--header", "Authorization: hunter2"],
    ["--url=https://me:hunter2@host/path"],
    ["https://me:hunter2@host/path"],
    ["https://host/path?sig=1&access_token=hunter2&page=2"],
    ["hf_hunter2hunter2hunter2"],
    ["--hub=hf_hunter2hunter2hunter2"],
    ["sk-proj-hunter2hunter2hunter2"],
    ["github_pat_hunter2hunter2hunter2"],
    ["AKIAHUNTER2HUNTER234"],
    ["eyJhunter2hunter2.hunter2hunter2.x"],
    ["run", "Xhunter2hunter2hunter2hunter2hunter2"],
    ["-c", "login(token='hf_hunter2hunter2hunter2')"],
]


@pytest.mark.parametrize("arguments", SECRETS)
def test_secret_is_masked(arguments: list[str]):
    masked = mask_arguments(["train.py", *arguments, "--lr", "0.1"])
    assert "hunter2" not in " ".join(masked).lower()
    assert "12345" not in " ".join(masked)
    assert MASK in " ".join(masked)
    assert (masked[0], masked[-2], masked[-1]) == ("train.py", "--lr", "0.1")


@pytest.mark.parametrize(
    "argument",
    [
        "--tokenizer=/models/llama",
        "--max-tokens=4096",
        "--author=somebody",
        "optimizer.lr=1e-4",
        "/data/checkpoints/2026-11-27_bert-base-uncased/step_000100/model.safetensors",
        "--revision=7c1b0ff21c0e2a4b8d9ee1cbd2bd0f1a3a2b4c5d",
        "tcp://10.0.0.1:29500",
        "meta-llama/Llama-3.1-8B-Instruct",
        "--resume=outputs/Run01/Checkpoint02/EpochWithTheLowestValidationLoss03.pt",
    ],
)
def test_other_argument_stays(argument: str):
    assert mask_arguments([argument, "1"]) == (argument, "1")


def test_option_without_a_value_hides_no_other_option():
    assert mask_arguments(["--use-auth-token", "--lr", "0.1"]) == (
        "--use-auth-token",
        "--lr",
        "0.1",
    )


def test_value_of_a_variable_is_masked_by_its_form():
    assert mask_value("a:4,b:hf_abcdefabcdefabcdef") == f"a:4,b:{MASK}"
    assert mask_value(":4096:8") == ":4096:8"
