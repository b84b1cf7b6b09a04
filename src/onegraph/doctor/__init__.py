"""What is here, what would be compiled, and what to do about it. Nothing here imports torch: that may be what is broken.

``examine()`` gives the ``Report``: ``print(show.text(report))``, ``report.record()`` for JSON, ``report.breaks``.
"""

from onegraph.doctor.finding import Finding
from onegraph.doctor.report import Report, examine

__all__ = ["Finding", "Report", "examine"]
