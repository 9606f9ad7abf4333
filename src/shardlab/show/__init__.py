"""Pictures and tables over specs, costs and recorded data. Nothing here runs a model."""

from .compare import Comparison, compare
from .cuts import column_then_row, heads
from .measured import measured
from .palette import AXES, WORK
from .timeline import timeline
from .verdict import verdict

__all__ = ["AXES", "WORK", "Comparison", "column_then_row", "compare", "heads", "measured", "timeline", "verdict"]
