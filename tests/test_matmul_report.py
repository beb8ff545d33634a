"""What the benchmark of products says of its timings."""

from __future__ import annotations

import pytest

from scripts.matmul_report import LAYER, Timing, assert_never_slower, layer_totals, show


def timing(product: str, format: str, us: float, bf16_us: float, tokens: int = 64) -> Timing:
    return Timing(
        product=product,
        format=format,
        tokens=tokens,
        us=us,
        floor_us=1.0,
        tb_per_s=1.0,
        tflop_per_s=1.0,
        ratio_to_bf16=us / bf16_us,
    )


def layer(format: str, us: float) -> list[Timing]:
    return [timing(product, format, us, 10.0) for product in LAYER]


def test_a_layer_is_its_four_products_and_known_when_all_of_them_are() -> None:
    known = [*layer("bf16", 10.0), *layer("int4", 5.0), *layer("fp8", 6.0)[:3]]
    totals = {total.format: total for total in layer_totals(known)}
    assert totals.keys() == {"bf16", "int4"}
    assert totals["int4"].us == 20.0 and totals["int4"].ratio_to_bf16 == 0.5
    assert layer_totals(layer("int4", 5.0)) == []


def test_the_table_names_each_format_with_its_times_by_tokens(
    capsys: pytest.CaptureFixture[str],
) -> None:
    formats = ("bf16", "int4-act-order", "int4-act-order-copy")
    sizes = (1, 16, 64, 128, 256, 512, 1024, 2048, 8192)
    known = [timing("layer", name, 12345.0, 10000.0, m) for name in formats for m in sizes]
    known += [timing("head", "int8", 50.0, 100.0, 64), timing("qkv", "int4", 7.0, 7.0)]
    card = {"model": "m", "card": "c", "copy_tb_per_s": 4.0, "bf16_tflop_per_s": 700.0}
    show(card, known)
    rows = [
        [cell.strip() for cell in line.split("│")] for line in capsys.readouterr().out.split("\n")
    ]
    found = {row[1]: row[2:-1] for row in rows if len(row) == 3 + len(sizes)}
    wanted = {f"layer {name}": ["12345 (1.23)"] * len(sizes) for name in formats}
    wanted["head int8"] = ["50 (0.50)" if m == 64 else "-" for m in sizes]
    assert found == wanted


def test_a_slower_layer_fails_and_is_named() -> None:
    known = [*layer("bf16", 10.0), *layer("int4", 9.9), *layer("nvfp4", 11.0)]
    with pytest.raises(SystemExit, match=r"layer nvfp4 at 64 tokens: 1\.10 times"):
        assert_never_slower(layer_totals(known), 1.05)
    assert_never_slower(layer_totals(known), 1.2)


def test_the_rule_is_about_layers_and_heads_of_formats_that_are_served() -> None:
    """One slow product may be made up for by the others."""
    slow = [
        timing("qkv", "int4", 20.0, 10.0),
        *layer_totals(layer("bf16", 10.0)),
    ]
    assert_never_slower(slow, 1.0)
    with pytest.raises(SystemExit, match="head int8"):
        assert_never_slower([timing("head", "int8", 20.0, 10.0)], 1.0)


def test_of_codes_with_a_copy_the_copy_counts_where_it_was_timed() -> None:
    """With fewer tokens the codes are what is read."""
    many = [*layer("bf16", 10.0), *layer("int4", 11.0), *layer("int4-copy", 9.0)]
    assert_never_slower(layer_totals(many), 1.0)
    with pytest.raises(SystemExit, match="layer int4-copy"):
        assert_never_slower(layer_totals([*many[:8], *layer("int4-copy", 10.5)]), 1.0)
    few = [timing("layer", "int4", 11.0, 10.0, tokens=16)]
    with pytest.raises(SystemExit, match="layer int4 at 16"):
        assert_never_slower([*few, *layer_totals(many)], 1.0)
