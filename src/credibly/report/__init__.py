"""The HTML report: a page of text, tables and inline pictures in one file that needs nothing else."""

from credibly.report.demo import demo_page
from credibly.report.page import Column, Page, Section, Table, render, write
from credibly.report.pictures import Picture, picture

__all__ = ["Column", "Page", "Picture", "Section", "Table", "demo_page", "picture", "render", "write"]
