"""Small inline SVG plots for the HTML report. Colours are CSS classes of the page, so dark mode applies to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape

WIDTH, HEIGHT = 360, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 10, 44
_MOST_POINTS = 400
_LONGEST = 27

Point = tuple[float, float]


def short(name: str) -> str:
    """A name of at most 27 characters; the middle is left out, since many names begin alike."""
    half = _LONGEST // 2
    return name if len(name) <= _LONGEST else f"{name[:half]}…{name[-half:]}"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round tick values within [low, high]."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * digit for digit in (1, 2, 2.5, 5, 10) if power * digit >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Tick values 1, 2 and 5 of every decade within [low, high]; only powers of ten for more than three decades."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1, 2, 5) if len(decades) <= 3 else (1,)
    return [d * 10.0**e for e in decades for d in digits if low <= d * 10.0**e <= high]


class Plot:
    """
    A plot with one pair of axes.

    Args:
        x, y (`tuple[float, float]`): Ranges of the axes.
        x_label, y_label (`str`): Labels of the axes.
        log_x (`bool`, *optional*, defaults to `False`): A logarithmic x axis.
        percent (`str`, *optional*, defaults to `""`): Axes whose ticks are fractions shown as percent, such as `"xy"`.
        height (`int`, *optional*, defaults to 270): In pixels; the width is 360.
        y_ticks (`int`, *optional*, defaults to 5): Approximate number of ticks of the y axis.
    """

    def __init__(
        self,
        x: tuple[float, float],
        y: tuple[float, float],
        x_label: str,
        y_label: str,
        log_x: bool = False,
        percent: str = "",
        height: int = HEIGHT,
        y_ticks: int = 5,
    ):
        self.parts: list[str] = []
        self.height = height
        self._x = _scale(x, (_LEFT, WIDTH - _RIGHT), log_x)
        self._y = _scale(y, (height - _BOTTOM, _TOP))
        bottom, right = height - _BOTTOM, WIDTH - _RIGHT
        for value in ticks(*y, y_ticks):
            at = self._y(value)
            self._line("grid", _LEFT, right, at, at)
            self.text(_LEFT - 6, at + 4, _tick(value, "y" in percent), "end")
        for value in log_ticks(*x) if log_x else ticks(*x):
            self.text(self._x(value), bottom + 16, _tick(value, "x" in percent), "middle")
            self._line("axis", self._x(value), self._x(value), bottom, bottom + 4)
        self._line("axis", _LEFT, right, bottom, bottom)
        self.text((_LEFT + right) / 2, height - 8, x_label, "middle")
        middle = (_TOP + bottom) / 2
        turned = f"translate(12 {middle:.0f}) rotate(-90)"
        self._add(f'<text transform="{turned}" text-anchor="middle">{escape(y_label)}</text>')

    def _add(self, part: str) -> None:
        self.parts.append(part)

    def _line(self, kind: str, x1: float, x2: float, y1: float, y2: float) -> None:
        self._add(f'<line class="{kind}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>')

    def text(self, x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> None:
        """Text at a position in pixels."""
        name = f' class="{kind}"' if kind else ""
        self._add(f'<text{name} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>')

    def line(self, points: Iterable[Point], kind: str, fill: bool = False) -> None:
        """A line through points; `kind` is a CSS class such as `"line c1"`. `fill` closes it on the x axis."""
        shown = list(points)
        if len(shown) > _MOST_POINTS:  # more points only make the page larger
            kept = {round(i * (len(shown) - 1) / (_MOST_POINTS - 1)) for i in range(_MOST_POINTS)}
            shown = [shown[i] for i in sorted(kept)]
        path = " ".join(f"{self._x(x):.1f},{self._y(y):.1f}" for x, y in shown)
        if fill and shown:
            floor = self.height - _BOTTOM
            ends = [f"{self._x(x):.1f},{floor}" for x, _ in (shown[0], shown[-1])]
            self._add(f'<polygon class="{kind}" points="{ends[0]} {path} {ends[1]}"/>')
        else:
            self._add(f'<polyline class="{kind}" points="{path}"/>')

    def steps(self, edges: Sequence[float], values: Sequence[float], kind: str, fill: bool = False) -> None:
        """The outline of a histogram: `values` `[B]` between `edges` `[B + 1]`."""
        points = [
            (edge, value)
            for i, value in enumerate(values)
            for edge, value in ((edges[i], value), (edges[i + 1], value))
        ]
        self.line([(edges[0], 0.0), *points, (edges[-1], 0.0)], kind, fill)

    def bar(self, left: float, right: float, low: float, high: float, kind: str, tooltip: str = "") -> None:
        """A rectangle in data coordinates, with an optional tooltip."""
        x, y = self._x(left), self._y(max(low, high))
        width, height = self._x(right) - x, self._y(min(low, high)) - y
        title = f"<title>{escape(tooltip)}</title>" if tooltip else ""
        place = f'x="{x + 0.5:.1f}" y="{y:.1f}" width="{max(width - 1, 0.5):.1f}" height="{height:.1f}"'
        self._add(f'<rect class="{kind}" {place}>{title}</rect>')

    def label(self, x: float, y: float, text: str, kind: str = "count") -> None:
        """Text just above a point in data coordinates."""
        self.text(self._x(x), self._y(y) - 3, text, "middle", kind)

    def whisker(self, x: float, low: float, high: float, kind: str = "whisker") -> None:
        """A vertical error bar with caps."""
        at, top, bottom = self._x(x), self._y(high), self._y(low)
        caps = "".join(f"M{at - 3:.1f} {end:.1f}h6" for end in (bottom, top))
        self._add(f'<path class="{kind}" d="M{at:.1f} {bottom:.1f}V{top:.1f}{caps}"/>')

    def mark(self, x: float, kind: str) -> None:
        """A vertical line through the whole plot."""
        self._line(kind, self._x(x), self._x(x), _TOP, self.height - _BOTTOM)

    def render(self, label: str) -> str:
        """The `<svg>` element; `label` is its text for screen readers."""
        head = f'<svg viewBox="0 0 {WIDTH} {self.height}" role="img" aria-label="{escape(label)}">'
        return head + "".join(self.parts) + "</svg>"


def _scale(values: tuple[float, float], pixels: tuple[float, float], log: bool = False) -> Callable[[float], float]:
    """A function from data coordinates to pixels, clipped to the range of the axis."""
    low, high = (math.log(v) for v in values) if log else values
    span = (high - low) or 1.0

    def place(value: float) -> float:
        share = ((math.log(value) if log else value) - low) / span
        return pixels[0] + min(max(share, 0.0), 1.0) * (pixels[1] - pixels[0])

    return place


def _tick(value: float, percent: bool) -> str:
    return f"{100 * value:.4g}" if percent else f"{value:.6g}"
