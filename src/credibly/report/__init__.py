"""HTML reports: text, tables and inline pictures in one self-contained file."""

from credibly.report.assessment import Assessment, assess
from credibly.report.comparison import boosting_summary, compare_page
from credibly.report.fit import fit_page
from credibly.report.page import Column, Page, Recommendation, Section, Table, render, write
from credibly.report.pictures import Picture, picture
from credibly.report.several import target_pages

__all__ = [
    "Assessment",
    "Column",
    "Page",
    "Picture",
    "Recommendation",
    "Section",
    "Table",
    "assess",
    "boosting_summary",
    "compare_page",
    "fit_page",
    "picture",
    "render",
    "target_pages",
    "write",
]
