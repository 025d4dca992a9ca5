"""Metrics and reports."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from khtst_compile.errors import OverBudget
from khtst_compile.parity import ParityReport, Row, codes_differ, relative_error_db, worst_cosine, worst_ulp_of_terms


def test_relative_error() -> None:
    ref = np.array([3.0, 4.0], np.float32)
    assert relative_error_db(ref, ref) == -math.inf
    assert relative_error_db(ref * np.float32(1.01), ref) == pytest.approx(-40.0, abs=1e-3)
    assert relative_error_db(ref, np.zeros(2, np.float32)) == math.inf


def test_worst_cosine_is_that_of_the_worst_row() -> None:
    a = np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]], np.float32)
    b = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]], np.float32)
    assert worst_cosine(a, b) == pytest.approx(math.sqrt(0.5))
    assert worst_cosine(a[2:], b[2:]) == 1.0


def test_codes() -> None:
    a = np.array([-127, 127, 0, 5], np.int8)
    b = np.array([127, 127, 1, 5], np.int8)
    assert codes_differ(a, b) == (254.0, 0.5)
    assert codes_differ(a[:0], b[:0]) == (0.0, 0.0)


def test_ulp_of_terms_sees_one_unit_of_an_integer_sum() -> None:
    """acc = 100000 against 100001 with scale 1: 1 unit is 84 roundings of a term that size."""
    got, ref = np.array([100001.0], np.float32), np.array([100000.0], np.float32)
    assert worst_ulp_of_terms(got, ref, np.abs(ref)) > 80


def test_nan_is_over_every_budget() -> None:
    value = relative_error_db(np.array([math.nan], np.float32), np.ones(1, np.float32))
    assert not Row("a", "b", "dB", value, 1e9, "").ok


def test_report_names_the_first_over_in_order() -> None:
    rows = tuple(Row(f"layer{i}", "x", "dB", v, -30.0, "why & how") for i, v in enumerate((-40.0, -20.0, -10.0)))
    report = ParityReport(rows, {"a": 1.0})
    assert not report.ok and report.first_over == rows[1]
    with pytest.raises(OverBudget, match=r"layer1 .*2 of 3"):
        report.require("verify")
    suite = ET.fromstring(report.junit())
    assert suite.get("failures") == "2" and len(suite) == 3
    assert report.to_json()["first_over"]["site"] == "layer1"
    assert report.table(1).splitlines()[1].startswith("layer")
