"""Views of a report: terminal, SARIF, JUnit, GitHub annotations, Markdown, and one HTML page."""

from samelogits.report.github import github_text
from samelogits.report.html import html_text
from samelogits.report.junit import junit_text
from samelogits.report.markdown import markdown_text
from samelogits.report.sarif import sarif_text
from samelogits.report.terminal import candidate_text

__all__ = [
    "candidate_text",
    "github_text",
    "html_text",
    "junit_text",
    "markdown_text",
    "sarif_text",
]
