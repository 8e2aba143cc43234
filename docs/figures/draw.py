"""Figures of the pages that no record is behind: the decision tree of docs/choosing.md, and the path of a gradient.

python docs/figures/draw.py          # writes docs/images/choosing-*.svg and data-path-*.svg, light and dark
"""

from __future__ import annotations

from html import escape
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "images"
QUESTIONS = (
    ("Does a step wait for the network?", "gradwire probe", "no", ("DDP's own all-reduce",)),
    ("Must sums keep their bits?", "fidelity: exact", "yes", ("lossless",)),
    ("Must the parameters hardly change?", "near-lossless", "yes", ("gcomp, fp16, bf16",)),
    ("Does a stand-alone server add up?", "gradwire serve", "yes", ("thc: aggregator", "threelc: parameter server")),
    ("Are links about 1 Gb/s?", "balanced", "yes", ("int8: a safe start", "onebit, threelc: faster")),
    ("Are a few tensors very large?", "aggressive", "yes", ("dragonn, dgc, topk, by a mapping", "powersgd: matrices")),
)
LAST = ("threelc, onebit",)
Theme = dict[str, str]
THEMES: dict[str, Theme] = {
    "light": {"ink": "#1f2933", "line": "#9aa5b1", "ask": "#eef3f9", "answer": "#e3f4f0", "edge": "#2f6db5"},
    "dark": {"ink": "#e6edf3", "line": "#6b7785", "ask": "#26303d", "answer": "#1d3a37", "edge": "#5aa0f0"},
}
ROW, WIDTH, BOX, LEFT, RIGHT = 74, 720, 330, 10, 440
"""Height of a row, width of the picture and of a question, left edges of questions and of answers."""


def text(x: float, y: float, words: str, theme: Theme, size: int = 14, **style: str) -> str:
    """A line of text."""
    more = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{theme["ink"]}"{more}>{escape(words)}</text>'


def box(x: float, y: float, width: float, fill: str, edge: str) -> str:
    """A rounded box of the usual height."""
    return f'<rect x="{x}" y="{y}" width="{width}" height="48" rx="8" fill="{fill}" stroke="{edge}"/>'


def answer(x: float, y: float, lines: tuple[str, ...], theme: Theme) -> list[str]:
    """A box with what to use."""
    first = y + (29 if len(lines) == 1 else 20)
    texts = [text(x + 14, first + 18 * index, line, theme, 13) for index, line in enumerate(lines)]
    return [box(x, y, WIDTH - RIGHT - 10, theme["answer"], theme["line"]), *texts]


def arrow(path: str, theme: Theme, both: bool = False) -> str:
    """A line with a tip at its end, or at both."""
    start = ' marker-start="url(#tip)"' if both else ""
    return f'<path d="{path}" stroke="{theme["line"]}" marker-end="url(#tip)"{start}/>'


def picture(parts: list[str], height: int, theme: Theme) -> str:
    """The file."""
    tip = (
        '<marker id="tip" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="{theme["line"]}"/></marker>'
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" fill="none" stroke-width="1.4"'
    font = 'font-family="Verdana, DejaVu Sans, sans-serif"'
    return "\n".join([f"{head} {font}>", f"<defs>{tip}</defs>", *parts, "</svg>", ""])


def choosing(theme: Theme) -> str:
    """The decision tree."""
    parts = []
    for index, (question, hint, way, answers) in enumerate(QUESTIONS):
        y = 10 + ROW * index
        other = "yes" if way == "no" else "no"
        parts += [box(LEFT, y, BOX, theme["ask"], theme["edge"]), text(LEFT + 14, y + 21, question, theme)]
        parts += [text(LEFT + 14, y + 39, hint, theme, 11, font_style="italic")]
        parts += [arrow(f"M{LEFT + BOX} {y + 24}H{RIGHT - 6}", theme), text(LEFT + BOX + 30, y + 18, way, theme, 12)]
        parts += answer(RIGHT, y, answers, theme)
        parts += [arrow(f"M{LEFT + 60} {y + 48}v{ROW - 54}", theme), text(LEFT + 70, y + 66, other, theme, 12)]
    parts += answer(LEFT, 10 + ROW * len(QUESTIONS), LAST, theme)
    return picture(parts, ROW * (len(QUESTIONS) + 1), theme)


def data_path(theme: Theme) -> str:
    """The path of a gradient, from a bucket to the bucket's future."""
    boxes = {  # left edge, top, width, words
        "bucket": (10, 20, 120, "DDP bucket"),
        "slices": (170, 20, 180, "GradientSlice per tensor"),
        "fusion": (390, 20, 130, "tensor fusion"),
        "job": (560, 20, 120, "TensorJob"),
        "encode": (500, 130, 180, "encode"),
        "merge": (270, 130, 170, "decode and merge"),
        "mean": (10, 130, 200, "mean, written in place"),
        "residuals": (500, 220, 180, "residuals"),
        "future": (10, 220, 200, "future of the bucket"),
    }
    parts = []
    for name, (x, y, width, words) in boxes.items():
        fill = theme["answer"] if name in ("residuals", "future") else theme["ask"]
        parts += [box(x, y, width, fill, theme["edge"])]
        parts += [text(x + width / 2, y + 29, words, theme, 13, text_anchor="middle")]
    parts += [arrow(path, theme) for path in ("M130 44H164", "M350 44H384", "M520 44H554", "M260 68V92H600V74")]
    parts += [arrow("M640 68V124", theme), arrow("M500 144H446", theme), arrow("M440 164H494", theme)]
    parts += [arrow("M270 154H216", theme), arrow("M110 178V214", theme), arrow("M590 184V214", theme, both=True)]
    parts += [text(445, 138, "send", theme, 11), text(446, 198, "encode again:", theme, 11, text_anchor="end")]
    parts += [text(446, 213, "scatter-reduce, ring", theme, 11, text_anchor="end")]
    return picture(parts, 285, theme)


if __name__ == "__main__":
    for name, theme in THEMES.items():
        (FOLDER / f"choosing-{name}.svg").write_text(choosing(theme))
        (FOLDER / f"data-path-{name}.svg").write_text(data_path(theme))
