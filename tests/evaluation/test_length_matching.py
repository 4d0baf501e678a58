"""Length matching, and detectors without a model: sets that differ in length alone, and sets that differ otherwise."""

import numpy as np
import pytest
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.metrics import roc_auc_score

from dappr_llm.evaluation import length_matching
from dappr_llm.evaluation.bootstrap import bootstrap
from dappr_llm.evaluation.evaluators import evaluate_tables
from dappr_llm.evaluation.item_texts import ItemText
from dappr_llm.evaluation.length_matching import effective_rows, match_lengths, weighted_auroc
from dappr_llm.evaluation.ood_baselines import text_distances, trivial_sides
from dappr_llm.evaluation.ood_verdicts import against_trivial, not_matched
from dappr_llm.evaluation.prediction_table import PredictionTable


def table(lengths, epistemic, options=4, option_lengths=None, width=5, seed=0, **arrays):
    rows = len(lengths)
    counts = np.full(rows, options) if isinstance(options, int) else np.asarray(options)
    rng = np.random.default_rng(seed)
    meta = {"task": "made", "num_choices": 4, "task_num_choices": int(counts.max())}
    own = rng.integers(10, 14, rows) if option_lengths is None else option_lengths
    return PredictionTable.from_arrays(
        [f"{seed}-{row}" for row in range(rows)], rng.integers(counts), probs=rng.dirichlet(np.ones(width), rows),
        num_options=counts, epistemic=epistemic, density=-np.asarray(epistemic), lengths=np.asarray(lengths),
        option_lengths=own, meta=meta, **arrays,
    )  # fmt: skip


def pair(longer=12, signal=0.0, rows=1500, uses_length=1.0):
    """ID and OOD rows of which the latter are `longer` tokens longer; the score sees length and a real signal."""
    rng = np.random.default_rng(3)
    lengths = [np.rint(rng.normal(30, 7, rows)).clip(1).astype(int) for _ in range(2)]
    lengths[1] += longer
    scores = [uses_length * side + 2 * rng.normal(size=rows) for side in lengths]
    scores[1] += signal * 2
    return [table(side, score, seed=i) for i, (side, score) in enumerate(zip(lengths, scores, strict=True))]


def auroc(one, other):
    return roc_auc_score([0] * len(one) + [1] * len(other), np.concatenate([one.epistemic, other.epistemic]))


def test_an_auroc_of_length_alone_becomes_a_half():
    one, other = pair()
    assert auroc(one, other) > 0.85
    found = match_lengths(one, other)
    assert found.usable and weighted_auroc(one.epistemic, other.epistemic, found) == pytest.approx(0.5, abs=0.03)
    assert abs(found.length_auroc - 0.5) <= 0.02
    results = evaluate_tables(one, {"x": other})
    assert results["ood/x/auroc"] == pytest.approx(auroc(one, other))
    assert results["ood/x/auroc_length_matched"] == pytest.approx(0.5, abs=0.03)
    assert 50 < results["ood/x/matched_n_id"] < 1500 and results["ood/x/matched_length_auroc"] == found.length_auroc


def test_a_real_signal_stays():
    one, other = pair(signal=1.0, uses_length=0.0)
    found = match_lengths(one, other)
    assert weighted_auroc(one.epistemic, other.epistemic, found) == pytest.approx(auroc(one, other), abs=0.04)
    one, other = pair(longer=0, signal=1.0)  # nothing to match: nothing changes, and few rows are lost
    found = match_lengths(one, other)
    assert weighted_auroc(one.epistemic, other.epistemic, found) == pytest.approx(auroc(one, other), abs=0.02)
    assert found.id_rows > 1300


def test_differences_in_both_directions_are_matched():
    """OOD rows that are either shorter or longer pass a one-sided check; the two-sided one refines the bins."""
    rng = np.random.default_rng(0)
    own = np.rint(rng.normal(30, 6, 2000)).clip(1).astype(int)
    foreign = np.rint(30 + rng.choice([-9, 9], 2000) + rng.normal(0, 4, 2000)).clip(1).astype(int)
    one, other = table(own, np.abs(own - 30.0)), table(foreign, np.abs(foreign - 30.0), seed=1)
    found = match_lengths(one, other)
    assert found.balanced and weighted_auroc(one.epistemic, other.epistemic, found) == pytest.approx(0.5, abs=0.02)


def test_weights_are_invariant():
    one, other = pair()
    found = match_lengths(one, other)
    order = np.random.default_rng(0).permutation(len(one))
    shuffled = match_lengths(one.select(order), other)
    np.testing.assert_allclose(shuffled.id_weights, found.id_weights[order])
    # Twice the rows on one side: half the weight of each, the same figure.
    twice = table(
        np.tile(other.lengths, 2), np.tile(other.epistemic, 2), option_lengths=np.tile(other.option_lengths, 2)
    )
    double = match_lengths(one, twice)
    np.testing.assert_allclose(double.id_weights, found.id_weights)
    np.testing.assert_allclose(double.ood_weights, np.tile(found.ood_weights, 2) / 2)
    assert double.ood_rows == pytest.approx(2 * found.ood_rows)
    # Scores and labels play no part.
    blind = match_lengths(*(table(t.lengths, np.zeros(len(t)), option_lengths=t.option_lengths) for t in (one, other)))
    np.testing.assert_array_equal(blind.id_weights, found.id_weights)
    assert found.id_weights.sum() == pytest.approx(1) and found.ood_weights.sum() == pytest.approx(1)


def test_kish_and_weighted_auroc_by_hand():
    assert effective_rows(np.ones(7)) == 7 and effective_rows(np.zeros(3)) == 0
    assert effective_rows(np.array([3.0, 1.0])) == pytest.approx(16 / 10)
    rng = np.random.default_rng(1)
    one, other = pair(rows=300)
    found = match_lengths(one, other)
    scores = [rng.integers(0, 9, 300).astype(float) for _ in range(2)]
    expected = roc_auc_score([0] * 300 + [1] * 300, np.concatenate(scores), sample_weight=found.weights)
    assert weighted_auroc(*scores, found) == pytest.approx(expected)


def test_numbers_of_options_are_matched_exactly_and_said_where_they_differ():
    rng = np.random.default_rng(2)
    lengths = rng.integers(8, 40, 900)
    four, five = table(lengths, np.zeros(900)), table(lengths, np.ones(900), options=5, seed=1)
    results = evaluate_tables(four, {"csqa": five})
    assert np.isnan(results["ood/csqa/auroc_length_matched"]) and results["ood/csqa/matched_n_id"] == 0
    assert results["ood/csqa/auroc_trivial_options"] == 1
    assert not_matched(results) == [
        "csqa: lengths cannot be matched, its items offer 5 options and those in distribution 4 (`dappr evaluate "
        "--match-options` leaves out wrong ones)."
    ]
    mixed = table(lengths, rng.random(900), options=np.where(np.arange(900) < 300, 4, 5), seed=1)
    found = match_lengths(four, mixed)
    assert (found.ood_weights[300:] == 0).all() and found.usable
    intervals = bootstrap(four, {"csqa": five}, resamples=5)
    assert np.isnan(intervals["ood/csqa/auroc_length_matched"]).all()


def test_too_little_overlap_gives_no_figure():
    one, other = pair(longer=60, rows=300)
    results = evaluate_tables(one, {"x": other})
    assert np.isnan(results["ood/x/auroc_length_matched"])
    (sentence,) = not_matched(results)
    assert "too little overlaps" in sentence and "50 are needed" in sentence


def test_lengths_that_no_bins_balance_give_no_figure(monkeypatch):
    monkeypatch.setattr(length_matching, "_GRIDS", (2, 3))
    results = evaluate_tables(*((lambda one, other: (one, {"x": other}))(*pair(longer=15))))
    assert np.isnan(results["ood/x/auroc_length_matched"])
    assert "length itself keeps an AUROC of" in not_matched(results)[0]


def test_images_and_older_tables_have_no_lengths():
    bare = [table([1, 2, 3], np.arange(3.0), seed=i) for i in range(2)]
    for each in bare:
        each.lengths = each.option_lengths = None
    results = evaluate_tables(bare[0], {"x": bare[1]})
    assert match_lengths(*bare) is None
    assert not [key for key in results if "matched" in key or "trivial" in key] and not_matched(results) == []
    assert against_trivial(results, {}) == ""
    empty = bare[0].select([])
    assert match_lengths(empty, empty) is None


def test_intervals_hold_the_matched_figures_and_their_weights_are_fixed():
    one, other = pair(signal=0.7)
    results = evaluate_tables(one, {"x": other})
    found = bootstrap(one, {"x": other}, resamples=200)
    for key in ("auroc_length_matched", "auroc_density_length_matched", "auroc_trivial_length"):
        low, high = found[f"ood/x/{key}"]
        assert low < results[f"ood/x/{key}"] < high
    low, high = found["ood/x/auroc_length_matched"]
    raw_low, raw_high = found["ood/x/auroc"]
    assert high - low > raw_high - raw_low  # fewer effective rows


# --- detectors without a model ------------------------------------------------------------------------------------


def test_lengths_are_two_sided():
    one = table([10] * 50 + [11, 9] * 25, np.zeros(100))
    shorter, longer = (table([length] * 40, np.zeros(40), seed=1) for length in (3, 17))
    found = trivial_sides(one, {"shorter": shorter, "longer": longer})
    for task in ("shorter", "longer"):
        assert (found[task]["_trivial_length"][1] == 7).all()
        results = evaluate_tables(one, {task: {"shorter": shorter, "longer": longer}[task]})
        assert results[f"ood/{task}/auroc_trivial_length"] == 1
    assert "_trivial_question_mark" not in found["longer"] and "_trivial_tfidf" not in found["longer"]
    assert "_trivial_options" not in found["longer"]  # all items offer as many


def text(*parts):
    return ItemText(parts[0], tuple(parts[1:]))


def test_question_marks_count_by_what_is_usual():
    one, other = table([5] * 10, np.zeros(10)), table([5] * 10, np.zeros(10), seed=1)
    own = {name: text("It is a", "b") for name in one.ids.tolist()}
    foreign = {name: text("Is it? ", "b") for name in other.ids.tolist()}
    asked = trivial_sides(one, {"x": other}, {"me": own, "x": foreign}, "me")["x"]["_trivial_question_mark"]
    assert (asked[0] == -1).all() and (asked[1] == 0).all()
    usual = trivial_sides(other, {"x": one}, {"me": foreign, "x": own}, "me")["x"]["_trivial_question_mark"]
    assert (usual[0] == -1).all() and (usual[1] == 0).all()
    known = trivial_sides(one, {"x": other}, {"me": own}, "me")["x"]
    assert "_trivial_question_mark" not in known and "_trivial_tfidf" not in known  # texts of one side say nothing


def test_neighbours_are_scikit_learns_and_no_item_is_its_own():
    words = ["red fig", "blue plum", "green pear", "red plum", "blue fig", "green saw"]
    items = [text(word, "x") for word in words]
    train = [text(word, "x") for word in ("red pear", "blue saw")]
    (found,) = text_distances(train, items)
    vectorizer = TfidfVectorizer(sublinear_tf=True, token_pattern=r"(?u)\b\w+\b").fit([t.question for t in train])
    cosines = (vectorizer.transform(words) @ vectorizer.transform([t.question for t in train]).T).toarray()
    np.testing.assert_allclose(found, 1 - cosines.max(axis=1), atol=1e-9)

    rows = 60
    one, other = table([5] * rows, np.zeros(rows)), table([5] * rows, np.zeros(rows), seed=1)
    # Every ID text is unlike all others, so only an item compared with itself would look familiar.
    own = {name: text(f"word{i}", "x") for i, name in enumerate(one.ids.tolist())}
    foreign = {name: text(f"other{i}", "x") for i, name in enumerate(other.ids.tolist())}
    sides = trivial_sides(one, {"x": other}, {"me": own, "x": foreign}, "me")["x"]["_trivial_tfidf"]
    assert (sides[0] == 1).all() and (sides[1] == 1).all()
    same = trivial_sides(one, {"x": other}, {"me": own, "x": dict(zip(foreign, own.values(), strict=True))}, "me")
    assert 0.2 < (same["x"]["_trivial_tfidf"][1] == 0).mean() < 0.8  # half of the texts are in the half looked at


def test_distances_to_training_rows_in_the_tables_come_first():
    one = table([5] * 4, np.zeros(4), text_distance=np.zeros(4))
    other = table([5] * 3, np.zeros(3), seed=1, text_distance=np.array([0.5, 1, 0]))
    np.testing.assert_array_equal(trivial_sides(one, {"x": other})["x"]["_trivial_tfidf"][1], [0.5, 1, 0])


def test_a_run_that_length_beats_is_told_so():
    one, other = pair()
    rng = np.random.default_rng(0)
    one.epistemic, other.epistemic = (rng.random(1500).astype(np.float32) for _ in range(2))
    results, found = evaluate_tables(one, {"arc": other}), bootstrap(one, {"arc": other}, resamples=100)
    sentence = against_trivial(results, found)
    assert sentence.startswith(
        "Length alone separates these sets better than this run's epistemic score does (AUROC): arc by "
    )
    assert f"{100 * results['ood/arc/auroc_trivial_length']:.1f}" in sentence and "at equal lengths" in sentence
    one, other = pair(longer=0, signal=3.0)
    results, found = evaluate_tables(one, {"arc": other}), bootstrap(one, {"arc": other}, resamples=100)
    assert against_trivial(results, found) == ""
    assert results["ood/arc/auroc_minus_trivial_length"] == pytest.approx(
        results["ood/arc/auroc"] - results["ood/arc/auroc_trivial_length"]
    )


# --- the mixture --------------------------------------------------------------------------------------------------


def test_the_mixture_against_brute_force():
    rng = np.random.default_rng(5)
    one, other = pair(rows=40)
    one.epistemic, other.epistemic = (rng.integers(0, 6, 40).astype(np.float32) for _ in range(2))
    one.labels[:3] = -1  # left out
    other.labels[:15] = -1  # wrong, whatever is answered
    results = evaluate_tables(one, {"x": other})

    rows = []
    for side, each in enumerate((one, other)):
        probs = each.reading("own").probs
        for row in range(40):
            if side or each.labels[row] >= 0:
                rows.append(
                    (float(each.epistemic[row]), each.labels[row] >= 0 and probs[row].argmax() == each.labels[row])
                )
    orders = []
    for _ in range(4000):  # ties in every order
        shuffled = sorted(rng.permutation(len(rows)), key=lambda i: rows[i][0])
        wrong = np.array([not rows[i][1] for i in shuffled])
        orders.append((wrong.cumsum() / np.arange(1, len(rows) + 1)).mean())
    assert results["ood/x/mixture_aurc"] == pytest.approx(np.mean(orders), abs=2e-3)
    right = [correct for _, correct in rows]
    assert results["ood/x/mixture_failure_auroc"] == pytest.approx(roc_auc_score(right, [-u for u, _ in rows]))
    assert results["ood/x/mixture_risk"] == pytest.approx(1 - np.mean(right))
    assert results["ood/x/mixture_aurc_density"] != results["ood/x/mixture_aurc"]
    found = bootstrap(one, {"x": other}, resamples=50)
    low, high = found["ood/x/mixture_aurc"]
    assert low < results["ood/x/mixture_aurc"] < high
