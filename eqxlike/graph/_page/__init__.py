"""A report as one page."""

from ._page import page_of as page_of
