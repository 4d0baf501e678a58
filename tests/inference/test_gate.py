"""The gate of a checkpoint: fitted in one pass, the same however rows are read, refused when it is not its own."""

import json

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.numpy import load_file, save_file
from tiny import build_classifier, build_model, label_names, make_rows, make_texts

from dappr_llm.core.errors import UserError
from dappr_llm.decisions.density import combined, neighbour_scores, normalised
from dappr_llm.decisions.gate import FILE, TENSORS, Gate
from dappr_llm.inference.gate import GateScorer, base_fingerprint
from dappr_llm.inference.gate_fitting import GateRows, fit_gate
from dappr_llm.inference.table_predictor import PredictionSettings, TablePredictor
from dappr_llm.methods.cross_entropy import CrossEntropy
from dappr_llm.methods.dappr import DAPPr
from dappr_llm.methods.mc_dropout import MCDropout
from dappr_llm.text.backend import TextBackend
from dappr_llm.text.prompt import LabelPrompt
from dappr_llm.text.readouts.head import HeadReadout

TASTES = ("plum", "fig", "pear", "hammer", "saw", "drill", "red", "blue", "green", "sky", "grass", "story")


def questions(count, start=0):
    """Rows that all differ."""
    rows = make_rows(count, start)
    for i, row in enumerate(rows, start):
        row["question"] = f"Which {TASTES[i % 12]} {TASTES[i // 12 % 12]} {TASTES[i // 144 % 12]} is" + " a very" * (
            i % 3
        )
    return rows


def predictor(tokenizer, method=None, settings=None, **options):
    torch.manual_seed(3)
    lora = LoraConfig(
        r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False, lora_dropout=0.3, task_type="CAUSAL_LM"
    )
    model = get_peft_model(build_model(layers=3), lora).eval()
    method = method or DAPPr()
    return TablePredictor(model, method, TextBackend(model, tokenizer, method, 4, **options), settings=settings)


def head_predictor(tokenizer):
    labels = label_names(3)
    model = build_classifier(3, layers=3).eval()
    readout = HeadReadout(model, tokenizer, labels, CrossEntropy())
    backend = TextBackend(model, tokenizer, CrossEntropy(), prompt=LabelPrompt(), readout=readout)
    return TablePredictor(model, CrossEntropy(), backend)


@pytest.fixture(scope="module")
def train():
    return questions(100)


@pytest.fixture(scope="module")
def held_out():
    return questions(60, start=200)


@pytest.fixture
def gate(tokenizer, train, held_out):
    return fit_gate(predictor(tokenizer), GateRows(train, "mine", "train"), GateRows(held_out, "mine", "calibration"))


def close(one, other):
    for name, values in one.tensors.items():
        if name != "components":  # only the space that they span is determined
            np.testing.assert_allclose(values, other.tensors[name], rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(one.centre, other.centre, rtol=1e-3)


def test_batches_packing_and_order_change_nothing(tokenizer, train, held_out, gate):
    ways = [
        {"settings": PredictionSettings(batch_size=3, max_tokens=0)},
        {"packing": False},
        {"settings": PredictionSettings(max_tokens=97)},
    ]
    base = predictor(tokenizer).with_gate(GateScorer(gate)).predict_table(held_out)
    assert base.density is not None and base.familiarity is not None
    for way in ways:
        other = predictor(tokenizer, **way)
        fitted = fit_gate(other, GateRows(train[::-1]), GateRows(held_out[::-1]))
        close(gate, fitted)
        table = other.with_gate(GateScorer(fitted)).predict_table(held_out)
        np.testing.assert_allclose(table.density, base.density, atol=1e-4)
        np.testing.assert_allclose(table.probs, base.probs, atol=1e-5)
        assert np.abs(table.familiarity - base.familiarity).max() < 0.05  # ranks may change places


def test_a_table_has_the_densities_of_its_rows_one_by_one(tokenizer, held_out, gate):
    engine = predictor(tokenizer).with_gate(GateScorer(gate))
    rows = [held_out[3], held_out[1], held_out[3]]
    table = engine.predict_table([{**row, "id": str(i)} for i, row in enumerate(rows)])
    for i, row in enumerate(rows):
        encoded = engine.backend.encode(engine.backend.items([row]))
        one = engine.predict_batch(encoded, 4)
        np.testing.assert_allclose(one.density, table.density[i : i + 1], atol=1e-4)
        assert 0 < one.familiarity[0] <= 1
    assert table.density[0] == table.density[2]
    plain = predictor(tokenizer).predict_table(rows[:2])
    assert plain.density is None and plain.familiarity is None


def test_mc_dropout_has_the_density_of_the_model_without_dropout(tokenizer, held_out, gate):
    method = MCDropout(passes=3)
    engine = predictor(tokenizer, method)
    several = engine.with_gate(GateScorer(gate)).predict_table(held_out[:7])
    single = predictor(tokenizer).with_gate(GateScorer(gate)).predict_table(held_out[:7])
    np.testing.assert_allclose(several.density, single.density, atol=1e-4)
    np.testing.assert_allclose(several.probs, engine.predict_table(held_out[:7]).probs, atol=1e-5)


def test_calibration_rows_are_ranked_among_themselves(tokenizer, held_out, gate):
    table = predictor(tokenizer).with_gate(GateScorer(gate)).predict_table(held_out)
    ranks = (table.density[:, None] >= table.density).sum(1)
    np.testing.assert_allclose(table.familiarity, (1 + ranks) / 61, atol=0.02)


def test_fixed_labels_get_a_mean_per_class(tokenizer):
    texts = make_texts(90)
    for i, row in enumerate(texts):
        row["text"] += f" {TASTES[i % 12]} {TASTES[i // 12]}"
    engine = head_predictor(tokenizer)
    gate = fit_gate(engine, GateRows(texts))
    assert gate.kind == "class_gaussian" and gate.tensors["means"].shape[1] == 3 and gate.familiarity is None
    assert fit_gate(engine, GateRows(texts), kind="gaussian").tensors["means"].shape[1] == 1
    table = engine.with_gate(GateScorer(gate)).predict_table(texts[:5])
    assert table.density is not None and table.familiarity is None


@pytest.mark.parametrize("kind", ["gaussian", "knn"])
def test_the_scorer_is_the_density_of_arrays(tokenizer, train, held_out, kind):
    """In torch, for all groups at once, what `decisions.density` says with numpy and scikit-learn."""
    engine = predictor(tokenizer)
    gate = fit_gate(engine, GateRows(train), kind=kind)
    prepared = engine.backend.prepare(held_out, labelled=False)
    found = {
        number: row
        for numbers, part in engine.pooled_states(prepared, None, "")
        for number, row in zip(numbers, part, strict=True)
    }
    features = np.stack([found[number] for number in range(len(held_out))])
    unit = normalised(features)
    scores = []
    for group in range(len(gate.groups)):
        if kind == "knn":
            scores.append(neighbour_scores(gate.tensors["rows"][group].astype(float), unit[:, group]))
            continue
        centred = unit[:, group] - gate.tensors["means"][group]
        inside = centred @ gate.tensors["components"][group].astype(float)
        rest = (centred**2).sum(-1) - (inside**2).sum(-1)
        scores.append(
            -((inside**2 / gate.tensors["variances"][group]).sum(-1) + rest / gate.tensors["rest"][group]) / 2
        )
    expected = combined(np.stack(scores, axis=1), gate.centre, gate.spread)
    np.testing.assert_allclose(GateScorer(gate)(torch.from_numpy(features)), expected, atol=2e-3)


def test_a_round_trip(tokenizer, held_out, gate, tmp_path):
    gate.bound("a" * 64).save(tmp_path)
    again = Gate.load(tmp_path, "a" * 64)
    engine = predictor(tokenizer)
    one, other = (engine.with_gate(GateScorer(each)).predict_table(held_out) for each in (gate, again))
    np.testing.assert_array_equal(one.density, other.density)
    np.testing.assert_array_equal(one.familiarity, other.familiarity)
    assert again.fitted_on == {"task": "mine", "split": "train", "n": 100, "n_standard": 20}
    assert again.calibrated_on == {"task": "mine", "split": "calibration"}


def test_foreign_and_damaged_files_are_refused(gate, tmp_path):
    gate.bound("a" * 64).save(tmp_path)
    with pytest.raises(UserError, match="other weights"):
        Gate.load(tmp_path, "b" * 64)
    text = (tmp_path / FILE).read_text()
    (tmp_path / FILE).write_text(text.replace('"n": 100', '"n": 200'))
    with pytest.raises(UserError, match=r"checksum differs.*dappr gate"):
        Gate.load(tmp_path)
    (tmp_path / FILE).write_text(text.replace('"kind": "gaussian"', '"kind": "magic"'))
    with pytest.raises(UserError, match="kind"):
        Gate.load(tmp_path)
    (tmp_path / FILE).write_text(text)
    whole = (tmp_path / TENSORS).read_bytes()
    (tmp_path / TENSORS).write_bytes(whole[:-4])
    with pytest.raises(UserError, match=r"gate.safetensors is missing or damaged"):
        Gate.load(tmp_path)
    (tmp_path / TENSORS).unlink()
    with pytest.raises(UserError, match="missing or damaged"):
        Gate.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("rest", lambda v: v * 0, "not positive"),
        ("means", lambda v: v * np.nan, "NaN"),
        ("components", lambda v: v[:, :-1], "shape"),
        ("calibration", lambda v: v[:-1], "not 60 numbers"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(gate, tmp_path, name, change, message):
    """Also when both hashes were made to fit."""
    import hashlib

    from dappr_llm.decisions import gate as module

    gate.save(tmp_path)
    tensors = load_file(tmp_path / TENSORS)
    tensors[name] = np.ascontiguousarray(change(tensors[name]))
    save_file(tensors, tmp_path / TENSORS)
    content = json.loads((tmp_path / FILE).read_text())
    content["tensors_sha256"] = hashlib.sha256((tmp_path / TENSORS).read_bytes()).hexdigest()
    content["checksum"] = module._checksum(content)
    (tmp_path / FILE).write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        Gate.load(tmp_path)


def test_what_belongs_to_another_model(gate):
    own = (gate.groups, gate.base_sha256, gate.precision)
    assert gate.difference(*own) is None
    assert "other layers" in gate.difference(("read state",), *own[1:])
    assert "another base" in gate.difference(own[0], "0" * 64, own[2])
    assert "bfloat16" in gate.difference(*own[:2], "bfloat16")
    assert base_fingerprint(build_model(layers=3)) == base_fingerprint(build_model(layers=3).bfloat16())
    other = build_model(layers=3)
    torch.nn.init.normal_(other.model.norm.weight)
    assert base_fingerprint(other) != base_fingerprint(build_model(layers=3))


def test_what_cannot_be_fitted_is_refused(tokenizer, train):
    engine = predictor(tokenizer)
    with pytest.raises(UserError, match="at least 63 training rows, and there are 20"):
        fit_gate(engine, GateRows(train[:20]))
    with pytest.raises(UserError, match="needs fixed labels"):
        fit_gate(engine, GateRows(train), kind="class_gaussian")
    with pytest.raises(UserError, match="gaussian"):
        fit_gate(engine, GateRows(train), kind="gausian")
    same = [{**train[0], "id": str(i)} for i in range(70)]
    with pytest.raises(UserError, match="are the same in all 56 rows"):
        fit_gate(engine, GateRows(same))
    with torch.no_grad():
        engine.model.get_base_model().model.embed_tokens.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="NaN"):
        fit_gate(engine, GateRows(train))
