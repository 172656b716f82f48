"""The command through its entry point, as a person runs it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

import mtplx
from mtplx.options import RuleName, WeightsForm

MAIN = "import sys; sys.argv[0] = 'mtplx'; from mtplx.cli import main; main()"


def run(*args: str, stdin: bytes | None = b"", env: dict[str, str] | None = None):
    return subprocess.run(
        [sys.executable, "-c", MAIN, *args],
        input=stdin,
        capture_output=True,
        timeout=240,
        env={**os.environ, "COLUMNS": "100", **(env or {})},
        check=False,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random llama: what it says is nonsense, how the command treats it is not."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny.write_gguf(path)
    return str(path)


@pytest.fixture(scope="module")
def real_model(default_model_path: Path) -> str:
    return str(default_model_path)


def fails(result, code: int, *words: str) -> None:
    message = result.stderr.decode()
    assert result.returncode == code, message
    assert "Traceback" not in message
    assert result.stdout == b""
    for word in words:
        assert word in message, message


@pytest.mark.parametrize(
    "command", ["generate", "pull", "inspect", "convert", "bench", "tune", "compare", "certify"]
)
def test_every_command_has_help(command):
    result = run(command, "--help")
    assert result.returncode == 0
    assert b"Usage: mtplx " + command.encode() in result.stdout


def test_version():
    assert run("--version").stdout.decode().strip() == f"mtplx {mtplx.__version__}"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["generate", "x", "--no-such-option"], ["--no-such-option"]),
        (["generate", "x", "--draft", "magic"], ["draft"]),
        (["generate", "x", "--verify", "magic"], ["verify"]),
        (["generate", "x", "--top-p", "2"], ["top_p", "2.0"]),
        (["generate", "x", "--top-k", "-1"], ["top_k"]),
        (["generate", "x", "--temperature", "nan"], ["temperature"]),
        (["generate", "x", "--min-p", "1.5"], ["min_p"]),
        (["generate", "x", "--repetition-penalty", "0"], ["repetition_penalty"]),
        (["generate", "x", "--max-tokens", "0"], ["max_tokens"]),
        (["generate", "x", "--seed", "-1"], ["seed"]),
        (["generate", "x", "--depth", "-1"], ["depth"]),
        (["generate", "x", "--depth", "deep"], ["depth", "'auto' or an integer", "deep"]),
        (["generate", "x", "--stop", ""], ["stop"]),
        (["generate", "x", "--logit-bias", "five"], ["--logit-bias", "ID=AMOUNT"]),
        (["bench", "nothing"], ["nothing"]),
        (["bench", "law", "--json", "--markdown"], ["--json", "--markdown"]),
        (["bench", "law", "--plot", "x.png"], ["--plot", "bench law"]),
        (["no-such-command"], ["no-such-command"]),
    ],
)
def test_a_wrong_command_is_a_usage_error_that_names_what_is_wrong(args, words):
    fails(run(*args), 2, *words)


def test_an_unknown_model_is_a_failure_that_names_it(tmp_path):
    fails(run("generate", "x", "--model", "no-such-model"), 1, "no-such-model")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    fails(run("generate", "x", "--model", str(broken)), 1, "broken.gguf")
    fails(run("inspect", str(broken)), 1, "broken.gguf")
    fails(run("pull", "no-such-model"), 1, "no-such-model")


def test_a_prompt_that_is_not_utf8_is_a_usage_error():
    fails(run("generate", "-", stdin=b"\xff\xfe"), 2, "UTF-8")


def test_an_empty_prompt_and_an_mtp_draft_without_a_head_are_usage_errors(model):
    fails(run("generate", "", "--raw", "-m", model), 2, "prompt is empty")
    fails(run("generate", "x", "--draft", "mtp", "-m", model), 2, "MTP head")


def test_a_bias_on_no_token_is_a_usage_error(model):
    fails(run("generate", "x", "-m", model, "--logit-bias", "999999=1"), 2, "logit_bias", "999999")


def test_json_and_text_agree_and_logs_stay_off_stdout(model):
    args = ["generate", "Say hello.", "-m", model, "--seed", "5", "-n", "12"]
    found = run(*args, "--json")
    assert found.returncode == 0, found.stderr.decode()
    result = json.loads(found.stdout)
    assert set(result) == {"text", "token_ids", "finish_reason", "seed", "stats"}
    assert result["seed"] == 5
    assert result["finish_reason"] in ("stop", "length")
    assert 0 < len(result["token_ids"]) <= 12
    assert result["stats"]["tokens"] == len(result["token_ids"])
    text = run(*args, stdin=None)
    assert text.stdout.decode() == result["text"] + "\n"
    assert b"seed 5" in text.stderr


def test_standard_input_is_the_prompt_and_drafts_do_not_change_the_text(model):
    prompt = b"Repeat this: one two three four five one two three four five"
    common = ["-m", model, "--seed", "3", "-n", "24", "--json"]
    drafted = json.loads(run("generate", "-", *common, "--draft", "ngram", stdin=prompt).stdout)
    plain = json.loads(run("generate", *common, "--draft", "none", stdin=prompt).stdout)
    assert drafted["stats"]["rule"] == plain["stats"]["rule"] == "coupled"
    assert drafted["text"] == plain["text"]


def test_a_schema_and_a_regex_bind_the_text(model, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 3}')
    common = ["generate", "Say it.", "-m", model, "--seed", "1"]
    found = json.loads(run(*common, "--json-schema", str(schema)).stdout)
    assert 2 <= len(found) <= 3
    assert set(found) <= {1, 2}
    assert re.fullmatch(rb"(ab|ba){2}\n", run(*common, "--regex", "(ab|ba){2}").stdout)
    fails(run(*common, "--regex", "("), 2, "regex")
    fails(run(*common, "--regex", "a", "--json-schema", str(schema)), 2, "not both")
    fails(run(*common, "--json-schema", str(tmp_path / "none.json")), 2, "none.json")
    ban = ["--regex", "a", "--ban", str(tiny.EOS), "--json"]
    fails(run(*common, *ban), 1, "regex", "banned_ids", "position 1")


def test_bans_min_tokens_and_logprobs_reach_the_output(model):
    common = ["generate", "Say.", "-m", model, "-t", "0", "--json", "-n", "8"]
    eos = ["--logit-bias", f"{tiny.EOS}=60"]
    assert json.loads(run(*common, *eos).stdout)["token_ids"] == [tiny.EOS]
    later = json.loads(
        run(*common, *eos, "--min-tokens", "3", "--logprobs", "--top-logprobs", "2").stdout
    )
    assert later["token_ids"].index(tiny.EOS) == 3
    assert [each["token_id"] for each in later["logprobs"]] == later["token_ids"]
    assert later["logprobs"][0] == {
        "token_id": later["token_ids"][0], "logprob": 0.0, "top": [[later["token_ids"][0], 0.0]]
    }  # fmt: skip
    banned = ["--ban", str(later["token_ids"][0])]
    assert json.loads(run(*common, *banned).stdout)["token_ids"][0] != later["token_ids"][0]
    fails(run(*common[:-3], "--logprobs"), 2, "--json")


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_the_rule_is_chosen_and_reported(model, rule):
    common = ["generate", "a b a b", "-m", model, "-n", "4", "--json"]
    assert json.loads(run(*common, "--verify", rule).stdout)["stats"]["rule"] == rule
    if rule != "token":
        seed = ["--seed", "2"] if rule == "coupled" else []
        assert json.loads(run(*common, *seed).stdout)["stats"]["rule"] == rule


def test_every_sampling_field_reaches_the_law(model):
    """A bias of -inf on everything the model said first must change what it says."""
    common = ["generate", "Say hello.", "-m", model, "-n", "1", "-t", "0", "--json"]
    first = json.loads(run(*common).stdout)["token_ids"][0]
    banned = json.loads(run(*common, "--logit-bias", f"{first}=-inf").stdout)["token_ids"][0]
    assert banned != first


@pytest.mark.model
def test_show_drafts_colours_and_no_color_does_not(real_model):
    args = [
        "generate",
        "Repeat: a b c d e f a b c d e f",
        "-m",
        real_model,
        "--seed",
        "3",
        "-n",
        "16",
    ]
    coloured = run(*args, "--show-drafts", env={"FORCE_COLOR": "1"}).stdout.decode()
    plain = run(*args).stdout.decode()
    bare = run(*args, "--show-drafts", env={"NO_COLOR": "1"}).stdout.decode()
    assert "\x1b[" in coloured
    assert bare == plain


def test_inspect_says_what_would_run(model):
    text = run("inspect", model).stdout.decode()
    for word in ("llama", "320", "BLAS"):
        assert word in text
    found = json.loads(run("inspect", model, "--json").stdout)
    assert found["architecture"] == "llama"
    assert (found["mtp"], found["verdict"]) == ("none", "AR only")


def test_tune_stores_what_generate_then_uses(model, tmp_path):
    env = {"MTPLX_CACHE": str(tmp_path)}
    args = ["generate", "a b a b a", "-m", model, "-n", "8", "--seed", "1", "--json"]
    assert json.loads(run(*args, env=env).stdout)["stats"]["costs"]["from"] == "default"
    found = json.loads(run("tune", "-m", model, "--json", env=env).stdout)
    assert found["stored"] == str(tmp_path / "costs.json")
    assert found["forward"][0] == 1
    costs = json.loads(run(*args, env=env).stdout)["stats"]["costs"]
    assert costs == {"from": "tuned", **{n: found[n] for n in ("forward", "draft", "start")}}
    table = run("tune", "-m", model, env=env).stdout.decode()
    for word in ("a round over 13 rows", "ms", "against 1 row", "costs.json"):
        assert word in table
    (tmp_path / "costs.json").write_text("{")
    text = run(*args[:-1], env=env)
    assert text.returncode == 0
    assert b"mtplx tune" in text.stderr


@pytest.mark.model
def test_compare_prints_text_and_the_table(real_model):
    result = run("compare", "Repeat: red green blue red green blue", "-m", real_model, "-n", "12")
    out = result.stdout.decode()
    assert result.returncode == 0, result.stderr.decode()
    for word in ("tokens/s", "acceptance length", "acceptance by position", "speed-up"):
        assert word in out


def test_an_interrupt_exits_with_130(model):
    length = ["-n", "2000", "--min-tokens", "2000"]  # no end of text before the signal comes
    worker = subprocess.Popen(
        [sys.executable, "-c", MAIN, "generate", "Write a long story.", "-m", model, *length],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert worker.stdout is not None
    worker.stdout.read(1)
    worker.send_signal(2)
    _, errors = worker.communicate(timeout=60)
    assert worker.returncode == 130
    assert b"interrupted" in errors
    assert b"Traceback" not in errors


def test_a_reader_that_goes_away_is_not_a_traceback(model):
    command = (
        f'"{sys.executable}" -c "{MAIN}" generate "Count to fifty." -m "{model}" -n 40 | head -c 1'
    )
    result = subprocess.run(["bash", "-c", command], capture_output=True, timeout=120, check=False)
    assert b"Traceback" not in result.stderr
    assert b"Exception ignored" not in result.stderr


def test_choices_are_the_same_everywhere():
    from typing import get_args

    from mtplx.verify import RULES

    assert set(get_args(RuleName)) == set(RULES)
    assert get_args(WeightsForm) == ("auto", "packed", "float32")
