"""Keep memories sound, and carry them from one place to another."""

from knnlm.guarding.exporting import Exporting, export
from knnlm.guarding.findings import Problem, Verification
from knnlm.guarding.importing import Importing, import_arrays
from knnlm.guarding.merging import Merging, merge
from knnlm.guarding.repairing import Repair, repair
from knnlm.guarding.verifying import verify

__all__ = [
    "Exporting",
    "Importing",
    "Merging",
    "Problem",
    "Repair",
    "Verification",
    "export",
    "import_arrays",
    "merge",
    "repair",
    "verify",
]
