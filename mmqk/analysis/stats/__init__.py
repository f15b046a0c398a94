"""Effects with intervals, exact tests, and corrections for several claims."""

from mmqk.analysis.stats.auroc import Auroc
from mmqk.analysis.stats.effects import Effect
from mmqk.analysis.stats.exact import Counts

AnyEffect = Effect | Counts | Auroc
