"""Decision rules: what they promise, that they are read back as written, and what they refuse."""

import json
import math

import numpy as np
import pytest
from random_tables import calibration_table as make_table
from scipy.stats import beta

from dappr_llm.core.errors import UserError
from dappr_llm.decisions.calibrate import calibrate, table_hash
from dappr_llm.decisions.rule import Decision


def test_calibration_improves_what_it_says_it_improves():
    rule = calibrate(make_table(1500, temperature=0.4))
    assert rule.fit["nll_after"] < rule.fit["nll_before"] and rule.fit["ece_after"] < rule.fit["ece_before"]
    assert rule.temperature == pytest.approx(2.5, rel=0.25)


@pytest.mark.parametrize("score", ["lac", "aps", "possibility"])
def test_sets_cover_as_promised(score):
    covered = []
    for seed in range(30):
        rule = calibrate(make_table(500, seed, mixed=True), alpha=0.2, score=score)
        test = make_table(500, 1000 + seed, mixed=True)
        reading = test.reading("own")
        probs, alpha = rule.scale(reading.probs, reading.alpha, test.num_options)
        keys = [f"{seed}/{name}" for name in test.ids]
        sets = rule.sets(probs, alpha, test.num_options, keys, allow_empty=True)
        covered.append(sets[np.arange(500), test.labels].mean())
        full = rule.sets(probs, alpha, test.num_options, keys)
        assert (full >= sets).all() and full.any(axis=1).all()
        assert not full[np.arange(4) >= test.num_options[:, None]].any()
    assert np.mean(covered) == pytest.approx(0.8, abs=0.015)


def test_groups_get_thresholds_of_their_own_where_there_are_rows():
    plenty = calibrate(make_table(600, mixed=True)).conformal["thresholds"]["lac"]
    few = calibrate(make_table(200, mixed=True)).conformal["thresholds"]["lac"]
    assert set(plenty) == {"all", "3", "4"} and set(few) == {"all"}
    assert set(calibrate(make_table(600)).conformal["thresholds"]["lac"]) == {"all"}


def test_abstention_keeps_its_risk_in_all_but_the_stated_share():
    """True risk (on many fresh rows) exceeds the target in at most 5 % of calibrations, and rows are answered."""
    fresh = make_table(20_000, 99)
    reading = fresh.reading("own")
    exceeded, answered = [], []
    for seed in range(100):
        rule = calibrate(make_table(800, seed), max_risk=0.2)
        probs, _ = rule.scale(reading.probs, reading.alpha, fresh.num_options)
        kept = ~rule.abstain(probs, reading.epistemic)
        wrong = (probs.argmax(axis=1) != fresh.labels)[kept]
        exceeded.append(wrong.mean() > 0.2 if kept.any() else False)
        answered.append(kept.mean())
    assert np.mean(exceeded) <= 0.05
    assert np.mean(answered) > 0.3


def test_the_bound_is_clopper_pearsons():
    facts = calibrate(make_table(600), max_risk=0.2).abstention
    assert facts["risk_bound"] == pytest.approx(
        beta.ppf(0.95, facts["n_errors"] + 1, facts["n_answered"] - facts["n_errors"])
    )
    assert facts["risk"] <= facts["risk_bound"] <= 0.2 and facts["risk"] == facts["n_errors"] / facts["n_answered"]


def test_min_coverage_alone_decides_the_threshold():
    rule = calibrate(make_table(800), min_coverage=0.8)
    assert 0.8 <= rule.abstention["coverage"] < 0.9 and rule.abstention["max_risk"] is None


def test_what_cannot_be_promised_is_refused_or_abstained():
    table = make_table(500, sharpness=0.3)
    with pytest.raises(UserError, match="raise --max-risk or lower --min-coverage"):
        calibrate(table, max_risk=0.01, min_coverage=0.9)
    rule = calibrate(table, max_risk=0.01)
    assert rule.abstention["threshold"] is None and rule.abstention["coverage"] == 0
    assert rule.abstain(np.array([[1.0, 0.0]]), np.array([0.0])).all()


def test_the_order_of_rows_changes_nothing():
    table = make_table(400)
    other = table.select(np.random.default_rng(5).permutation(400))
    assert table_hash(table) == table_hash(other)
    one, two = calibrate(table), calibrate(other)
    assert one.temperature == pytest.approx(two.temperature, rel=1e-6)
    assert one.conformal["thresholds"]["lac"]["all"] == pytest.approx(
        two.conformal["thresholds"]["lac"]["all"], rel=1e-6
    )


def test_a_rule_survives_the_disk_to_the_last_bit(tmp_path):
    table = make_table(400, mixed=True)
    rule = calibrate(table)
    rule.save(tmp_path)
    again = Decision.load(tmp_path)
    assert again == rule
    reading = table.reading("own")
    for side in (rule, again):
        probs, alpha = side.scale(reading.probs, reading.alpha, table.num_options)
        sets = side.sets(probs, alpha, table.num_options, table.ids)
        abstain = side.abstain(probs, reading.epistemic)
    assert sets.shape == (400, 4) and abstain.shape == (400,)


def test_small_sets_give_all_options_rather_than_a_promise(tmp_path):
    rule = calibrate(make_table(100), alpha=0.005)
    assert rule.conformal["thresholds"]["lac"]["all"] is None
    rule.save(tmp_path)
    probs = np.array([[0.9, 0.1]])
    assert Decision.load(tmp_path).sets(probs, None, np.array([2]), ["x"], "lac").all()


def test_ce_has_no_possibility_score():
    rule = calibrate(make_table(300, dirichlet=False))
    assert set(rule.conformal["thresholds"]) == {"lac", "aps"}
    with pytest.raises(UserError, match="possibility"):
        calibrate(make_table(300, dirichlet=False), score="possibility")


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda text: text[: len(text) // 2], "not a valid JSON file.*run `dappr calibrate` again"),
        (lambda text: text.replace('"temperature": ', '"temperature": 1'), "changed after|temperature is"),
        (lambda text: "[]", "damaged"),
        (lambda text: text.replace('"format_version": 1', '"format_version": 9'), "newer"),
    ],
)
def test_a_spoilt_file_is_refused_in_one_sentence(tmp_path, spoil, words):
    path = calibrate(make_table(200)).save(tmp_path)
    path.write_text(spoil(path.read_text()))
    with pytest.raises(UserError, match=words):
        Decision.load(tmp_path)


def test_a_rule_belongs_to_its_weights(tmp_path):
    rule = calibrate(make_table(200))
    from dataclasses import replace

    replace(rule, weights_sha256="aa" * 32).save(tmp_path)
    assert Decision.load(tmp_path, "aa" * 32).weights_sha256 == "aa" * 32
    with pytest.raises(UserError, match="other weights"):
        Decision.load(tmp_path, "bb")


@pytest.mark.parametrize(
    "wishes, words",
    [
        ({"alpha": 0}, "alpha"),
        ({"max_risk": 1.5}, "max_risk"),
        ({"score": "laps"}, "lac"),
        ({"abstain_on": "epistemics"}, "epistemic"),
    ],
)
def test_bad_wishes_are_named(wishes, words):
    with pytest.raises(UserError, match=words):
        calibrate(make_table(200), **wishes)


def test_too_few_rows_and_unknown_labels():
    with pytest.raises(UserError, match="at least 100 rows"):
        calibrate(make_table(99))
    table = make_table(300)
    table.labels[:250] = -1
    with pytest.raises(UserError, match="got 50"):
        calibrate(table)


def test_the_file_is_plain_json(tmp_path):
    content = json.loads(calibrate(make_table(300)).save(tmp_path).read_text())
    assert content["calibration_set"]["n"] == 300 and content["calibration_set"]["task"] == "made"
    assert len(content["calibration_set"]["hash"]) == 64 and math.isfinite(content["temperature"])
