"""Temperature scaling: the fitted temperature, and what scaling leaves alone."""

import numpy as np
import pytest
from random_tables import calibration_table as make_table

from dappr_llm.decisions.rule import scale
from dappr_llm.decisions.temperature import fit_temperature


def test_temperature_is_found_again():
    for wanted in (0.5, 1.0, 3.0):
        table = make_table(4000, temperature=wanted, dirichlet=False)
        assert fit_temperature(table.probs, table.num_options, table.labels) == pytest.approx(1 / wanted, rel=0.1)


def test_scaling_keeps_evidence_order_and_options():
    table = make_table(50, mixed=True)
    reading = table.reading("own")
    probs, alpha = scale(reading.probs, reading.alpha, table.num_options, 2.5)
    own = np.arange(4) < table.num_options[:, None]
    assert probs.sum(axis=1) == pytest.approx(np.ones(50)) and (probs[~own] == 0).all() and (alpha[~own] == 0).all()
    assert alpha.sum(axis=1) == pytest.approx(reading.alpha.sum(axis=1), rel=1e-5)
    assert (probs.argmax(axis=1) == reading.probs.argmax(axis=1)).all()
    assert scale(np.array([[0.64, 0.16, 0.2]]), None, np.array([2]), 2.0)[0][0] == pytest.approx([2 / 3, 1 / 3, 0])
