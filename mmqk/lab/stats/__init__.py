"""Effects with intervals, exact tests, and corrections for several claims."""

from mmqk.lab.stats.auroc import Auroc
from mmqk.lab.stats.effects import Effect
from mmqk.lab.stats.exact import Counts

AnyEffect = Effect | Counts | Auroc
