"""The HTML report: a page of text, tables and inline pictures in one file that needs nothing else."""

from credibly.report.assessment import Judgement, assess, judge
from credibly.report.comparison import compare_page
from credibly.report.fit import fit_page
from credibly.report.page import Column, Page, Section, Step, Table, render, write
from credibly.report.pictures import Picture, picture

__all__ = [
    "Column",
    "Judgement",
    "Page",
    "Picture",
    "Section",
    "Step",
    "Table",
    "assess",
    "compare_page",
    "fit_page",
    "judge",
    "picture",
    "render",
    "write",
]
