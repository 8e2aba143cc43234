from gradwire.bench.kernels import run


def test_rows_are_complete():
    rows = run(size_mb=1, repeats=2, only="quantize_int8 nearest")
    assert [row.kernel for row in rows] == ["quantize_int8 nearest", "quantize_int8 nearest in place"]
    for row in rows:
        assert row.unit == "GB/s"
        assert row.p20 <= row.median <= row.p80
        assert row.fraction_of_copy > 0
        assert row.fraction_of_mix > 0
    assert rows[0].rival
    assert rows[0].speedup > 0
