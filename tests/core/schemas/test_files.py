"""Schemas of the files beside a checkpoint: what nobody of ours wrote is refused, with the file and the key."""

import copy
import json

import pytest

from dappr_llm.core.errors import UserError
from dappr_llm.core.schemas import check, documents, files
from dappr_llm.core.schemas.answers import AnswerRecord
from dappr_llm.core.schemas.decision import DecisionFile
from dappr_llm.core.schemas.manifest import ManifestFile
from dappr_llm.core.schemas.results import ResultsContent
from dappr_llm.core.schemas.sidecar import TextSidecar
from dappr_llm.core.schemas.trainer_state import TrainerStateFile

HASH = "ab" * 32
DECISION = {
    "format_version": 1,
    "temperature": 1.5,
    "conformal": {"alpha": 0.1, "score": "lac", "thresholds": {"lac": {"all": 0.5, "4": None}}},
    "abstention": {"score": "aleatoric", "threshold": 0.4, "risk": 0.1},
    "calibration_set": {"task": "obqa", "n": 100},
    "fit": {"nll_before": 1.0},
    "weights_sha256": HASH,
    "checksum": HASH,
}
SIDECAR = {
    "format_version": 1,
    "method": {"name": "dappr", "options": {"passes": 1}},
    "modality": "text",
    "base_model": "base",
    "num_choices": 2,
    "letters": ["A", "B"],
    "letter_token_ids": [36, 37],
    "extra_token_ids": [],
    "prompt": {"instruction": "i", "template": "{question} {choices}", "choice": "{letter} {text}"},
    "max_length": 256,
    "evidence_offset": 1.0,
}
ANSWER = {
    "id": "1", "answer": "x", "letter": "A", "choices": ["x", "y"], "probs": [0.6, 0.4], "alpha": None,
    "aleatoric": 0.4, "epistemic": 0.2, "prediction_set": None, "abstain": None,
}  # fmt: skip
MANIFEST = {"format_version": 1, "files": {"a/b.json": {"size": 3, "sha256": HASH}}, "checksum": HASH}
RESULTS = {
    "schema_version": 1,
    "meta": {"id": "obqa", "tables": {"obqa": "predictions/t.npz"}},
    "results": {"a": None},
}
STATE = {"global_step": 3, "max_steps": 10, "num_train_epochs": 1, "log_history": [{}], "stateful_callbacks": {}}
VALID = [
    (DecisionFile, DECISION),
    (TextSidecar, SIDECAR),
    (AnswerRecord, ANSWER),
    (ManifestFile, MANIFEST),
    (ResultsContent, RESULTS),
    (TrainerStateFile, STATE),
]


@pytest.mark.parametrize("schema, content", VALID)
def test_what_we_write_is_valid_and_later_keys_are_kept(schema, content):
    check(schema, content, "file")
    check(schema, {**content, "of_a_later_version": [1]}, "file")


@pytest.mark.parametrize("schema, content", VALID)
def test_every_missing_key_is_named(schema, content):
    needed = [key for key, field in schema.model_fields.items() if field.is_required()]
    assert needed
    for key in needed:
        with pytest.raises(UserError, match=f"^file: {key} is missing; allowed: "):
            check(schema, {k: v for k, v in content.items() if k != key}, "file")


@pytest.mark.parametrize(
    "schema, content, place, value, words",
    [
        (DecisionFile, DECISION, "temperature", -1.0, "temperature is -1.0; allowed: a number of at least 0.01"),
        (DecisionFile, DECISION, "temperature", 0, "temperature is 0"),
        (DecisionFile, DECISION, "temperature", 1e9, "at most 100"),
        (DecisionFile, DECISION, "temperature", float("nan"), "temperature is nan"),
        (DecisionFile, DECISION, "conformal.score", "lax", "did you mean lac"),
        (DecisionFile, DECISION, "conformal.score", "aps", "no thresholds for its own score"),
        (DecisionFile, DECISION, "conformal.thresholds.lac", {"4": 0.5}, "lacks the entry `all`"),
        (DecisionFile, DECISION, "conformal.thresholds.lac.all", "x", "conformal.thresholds.lac.all is 'x'; allowed: a number"),
        (DecisionFile, DECISION, "conformal.alpha", 1, "above 0 and below 1"),
        (DecisionFile, DECISION, "abstention.score", "luck", "abstention.score is 'luck'"),
        (DecisionFile, DECISION, "abstention.risk", 2, "abstention.risk is 2"),
        (DecisionFile, DECISION, "weights_sha256", "../x", "a SHA-256 in hexadecimal"),
        (TextSidecar, SIDECAR, "method.options.passes", 0, "passes is 0"),
        (TextSidecar, SIDECAR, "letter_token_ids", [36], "as many of each"),
        (TextSidecar, SIDECAR, "letter_token_ids", [36, -1], "letter_token_ids.1 is -1"),
        (TextSidecar, SIDECAR, "evidence_offset", "1", "did you mean 1"),
        (TextSidecar, SIDECAR, "max_length", True, "max_length is True"),
        (TextSidecar, SIDECAR, "prompt.template", None, "prompt.template is None; allowed: a text"),
        (ManifestFile, MANIFEST, "files", {"../x": {"size": 1, "sha256": HASH}}, "stay in the folder"),
        (ManifestFile, MANIFEST, "files", {"/dev/zero": {"size": 1, "sha256": HASH}}, "stay in the folder"),
        (ManifestFile, MANIFEST, "files", {"C:\\x": {"size": 1, "sha256": HASH}}, "stay in the folder"),
        (ManifestFile, MANIFEST, "files", {"a": {"size": -1, "sha256": HASH}}, "files.a.size is -1"),
        (ResultsContent, RESULTS, "results", {"a": "x"}, "results.a is 'x'; allowed: a number or null"),
        (ResultsContent, RESULTS, "meta.tables", {"obqa": "/etc/passwd"}, "meta.tables.obqa is '/etc/passwd'"),
        (TrainerStateFile, STATE, "global_step", -3, "global_step is -3"),
        (TrainerStateFile, STATE, "log_history", {}, "log_history is {}; allowed: a list"),
        (AnswerRecord, ANSWER, "probs", [1.0], "as many of each"),
        (AnswerRecord, ANSWER, "probs", [0.5, float("nan")], "probs.1 is nan"),
        (AnswerRecord, ANSWER, "answer", "z", "none of its choices"),
    ],
)  # fmt: skip
def test_bad_values_are_refused(schema, content, place, value, words):
    damaged = copy.deepcopy(content)
    *above, last = place.split(".")
    part = damaged
    for key in above:
        part = part[key]
    part[last] = value
    with pytest.raises(UserError, match=words):
        check(schema, damaged, "file")


def test_a_file_of_a_later_version_says_so_before_its_keys_are_judged(tmp_path):
    path = tmp_path / "decision.json"
    path.write_text(json.dumps({"format_version": 2, "all": "new"}))
    with pytest.raises(UserError, match=r"newer dappr_llm \(format 2\); please upgrade"):
        files.load(DecisionFile, path, "calibrate again")
    path.write_text("{")
    with pytest.raises(UserError, match="decision.json is not a valid JSON file.*; calibrate again"):
        files.load(DecisionFile, path, "calibrate again")


def test_a_temperature_below_zero_is_refused_though_its_checksum_is_right(tmp_path):
    from dappr_llm.decisions.rule import Decision, _checksum

    content = {**DECISION, "temperature": -1.0}
    content["checksum"] = _checksum({k: v for k, v in content.items() if k != "checksum"})
    (tmp_path / "decision.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="temperature is -1.0.*run `dappr calibrate` again"):
        Decision.load(tmp_path, HASH)


@pytest.mark.parametrize("name", documents.DOCUMENTS)
def test_schemas_are_printed_for_editors(name, capsys):
    from dappr_llm.commands.main import main

    assert main(["config-schema", name]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["$schema"].startswith("https://json-schema.org/") and found["properties"]
    refs = {text.split('"')[0] for text in json.dumps(found).split('"#/$defs/')[1:]}
    assert refs <= set(found.get("$defs", {}))  # every reference leads somewhere


def test_the_schema_of_a_recipe_knows_every_section_and_method():
    found = documents.document("recipe")
    assert "learning_rate" in found["properties"]["train"]["properties"]
    assert "target_modules" in found["properties"]["lora"]["properties"] and "base" in found["properties"]
    names = [form["properties"]["name"]["const"] for form in found["properties"]["method"]["oneOf"]]
    assert "dappr" in names and "ib_edl" in names
    from dappr_llm.commands.main import main

    assert main(["config-schema", "recip"]) == 2
