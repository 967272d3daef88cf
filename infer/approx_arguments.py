"""The options of a lossy verification, mode moe-spec (`dejax.spec.budget`)."""

from dataclasses import dataclass, fields

from dejax.errors import UsageError
from dejax.spec.budget import Rank, Select, VerifyBudget, Weights
from infer.argument_types import NonNegativeInt, PositiveInt


@dataclass(frozen=True)
class ApproxArguments:
    """Options of mode moe-spec, as flags."""

    approx_verify_budget: PositiveInt | None = None
    """Mode moe-spec: experts that a layer may use to verify a draft. NOT lossless."""
    approx_select: Select = "substitution"
    """Mode moe-spec: give a row others in place of experts beyond the budget, or leave them out."""
    approx_weights: Weights = "compensate"
    """Mode moe-spec: scale a row's gates to the sum they had, or leave them as they are."""
    approx_rank: Rank = "weight"
    """Mode moe-spec: what is within the budget, by router weight or by being on the device."""
    approx_exact_every: NonNegativeInt = 0
    """Mode moe-spec: rounds after which the KV of new tokens is made exact again; 0 never."""

    def __post_init__(self):
        given = [getattr(self, f.name) for f in fields(self)]
        if self.approx_verify_budget is None and given != [f.default for f in fields(self)]:
            raise UsageError("--approx-... needs --approx-verify-budget: experts a layer")

    @property
    def budget(self) -> VerifyBudget | None:
        """The budget of a verification, if there is one."""
        if self.approx_verify_budget is None:
            return None
        return VerifyBudget(
            self.approx_verify_budget,
            self.approx_select,
            self.approx_weights,
            self.approx_rank,
            self.approx_exact_every,
        )
