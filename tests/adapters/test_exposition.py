"""Pages of any content: what the reader makes of garbage, of all label texts and values, and of churning labels."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from controller.adapters.exposition import MEMORY, PageReader

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

fragments = st.sampled_from(
    [
        "vllm:num_requests_running",
        "{",
        "}",
        '"',
        "\\",
        "=",
        ",",
        " ",
        "\t",
        "\n",
        "#",
        "1",
        "NaN",
        "-Inf",
        "le",
        "0x",
        "_",
        "é",
        "\u2028",
    ]
)
garbage = st.lists(fragments, max_size=40).map("".join) | st.text(max_size=80)


@given(garbage, st.sampled_from([TEXT, OPENMETRICS, "text/html", ""]))
def test_no_page_crashes_the_reader(text: str, content_type: str) -> None:
    read = PageReader(lambda name: True).read(text, content_type)
    assert read.rows is not None or len(read.faults) == 1


@given(
    st.dictionaries(st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True), st.text(min_size=1), max_size=3), st.floats()
)
def test_labels_and_values_survive_the_text_format(labels: dict[str, str], value: float) -> None:
    def escaped(text: str) -> str:
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    pairs = ",".join(f'{name}="{escaped(text)}"' for name, text in labels.items())
    read = PageReader(lambda name: True).read(f"m{{{pairs}}} {value!r}\n", TEXT)
    assert read.faults == ()
    assert read.rows is not None
    (row,) = read.rows
    assert dict(row.labels) == labels
    assert repr(row.value) == repr(value)


def test_labels_that_churn_do_not_fill_memory() -> None:
    reader = PageReader(lambda name: True)
    for number in range(MEMORY + 10):
        reader._known[f"filler {number}"] = reader._identity("m")
    reader.read('m{a="b"} 1\n', TEXT)
    assert len(reader._known) == 1
