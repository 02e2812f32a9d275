"""The division of a run's time as an SVG bar with a legend, for HTML pages."""

from zaya_jax.aegis.views.goodput import BUCKETS, MEANINGS, Goodput

BAR_WIDTH = 10_000
"""Width of the bar in its own units: 0.01% of a run is less than a pixel."""


def bucket_class(bucket: str) -> str:
    """Returns the CSS class with the color of a bucket."""
    return f"b-{bucket.replace(' ', '-')}"


def goodput_bar(goodput: Goodput) -> str:
    """Returns the time of a run by bucket as SVG."""
    position, parts = 0.0, []
    for bucket in BUCKETS:
        # The total is 0 if a run has reported only once.
        width = BAR_WIDTH * goodput.seconds[bucket] / max(goodput.total, 1e-9)
        parts.append(
            f'<rect class="{bucket_class(bucket)}" x="{position:.0f}" width="{width:.0f}" height="24">'
            f"<title>{bucket}: {MEANINGS[bucket]}</title></rect>"
        )
        position += width
    view = f'viewBox="0 0 {BAR_WIDTH} 24" preserveAspectRatio="none"'
    return f'<svg class="bar" {view}>{"".join(parts)}</svg>'


def goodput_legend(goodput: Goodput) -> str:
    """Returns the buckets with any time as an HTML list."""
    items = "".join(
        f'<li title="{MEANINGS[bucket]}"><svg viewBox="0 0 10 10"><rect class="{bucket_class(bucket)}" '
        f'width="10" height="10"/></svg>{bucket} {seconds / max(goodput.total, 1e-9):.1%} '
        f"({seconds:,.0f} s)</li>"
        for bucket in BUCKETS
        if (seconds := goodput.seconds[bucket])
    )
    return f'<ul class="buckets">{items}</ul>'
