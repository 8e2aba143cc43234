from __future__ import annotations

from typer.testing import CliRunner

from gradwire.cli.app import build_app


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(build_app(), ["graph", *arguments])
    assert result.exit_code == 0, result.exception
    return result.output


def test_the_table_says_who_sends_what_to_whom_and_after_what() -> None:
    lines = invoke("scatter_reduce", "--ranks", "3", "--rank", "1", "--partitions", "6").splitlines()
    assert lines[0].endswith("onebit(block=0), 3 ranks, 6 partitions: rank 1 runs 28 operations")
    assert lines[1] == "chunk 0"
    assert [" ".join(line.split()) for line in lines[2:6]] == [
        "18 encode encode scatter",
        "19 send send scatter to rank 0 after 18",
        "20 recv recv gather from rank 0",
        "21 decode decode gather after 18, 20",
    ]


def test_hierarchical_is_drawn_on_nodes() -> None:
    text = invoke("hierarchical", "--ranks", "4", "--ranks-per-node", "2")
    assert "4 ranks on nodes of 2" in text
    assert "send reduce" in text and "merge scatter" in text and "send spread" in text


def test_graphviz_gets_its_own() -> None:
    text = invoke("ring", "--dot")
    assert text.startswith('digraph "ring of 4,096 elements" {')
    assert 'label="recv ring from rank 3"' in text
    assert text.rstrip().endswith("}")


def test_unknown_names_get_the_known_ones() -> None:
    for arguments in (["rings"], ["ring", "--compressor", "onebitt"]):
        assert "Did you mean" in str(CliRunner().invoke(build_app(), ["graph", *arguments]).exception)
