"""All layouts by name. To add one, write its file and add a line here."""

from kvarn.cache.layout import Layout
from kvarn.cache.layouts.columns import Columns
from kvarn.cache.layouts.head_major import HeadMajor
from kvarn.cache.layouts.panel import Panel
from kvarn.cache.layouts.repeated import Repeated
from kvarn.cache.layouts.token_major import TokenMajor

LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        TokenMajor(),
        HeadMajor(),
        Panel(),
        Columns(),
        Repeated(),
    )
}
