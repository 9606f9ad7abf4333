"""Pictures and tables over specs, costs and recorded data. Nothing here runs a model."""

from .calculator import calculator
from .compare import Comparison, compare, wire
from .cuts import column_then_row, heads, through_a_block
from .held import over_cards, stacked
from .latency import latency
from .measured import measured
from .palette import AXES, WORK
from .pipeline import pipeline
from .steps import steps
from .timeline import timeline
from .training import training
from .verdict import verdict
from .waits import waits

__all__ = ["AXES", "WORK", "Comparison", "calculator", "column_then_row", "compare", "heads", "latency", "measured",
           "over_cards", "pipeline", "stacked", "steps", "through_a_block", "timeline", "training", "verdict", "waits",
           "wire"]
