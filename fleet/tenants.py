"""What each tenant has unfinished in a fleet, over all front ends, also after its clients have left."""

from __future__ import annotations

from dataclasses import dataclass, field

from .messages import NewRequest


@dataclass(slots=True)
class _Use:
    """The unfinished work of one tenant: numbers of requests by the id of their response, and sequences."""

    responses: dict[str, set[int]] = field(default_factory=dict)
    sequences: int = 0


class TenantUse:
    """Counts unfinished requests and sequences by tenant."""

    def __init__(self) -> None:
        self._uses: dict[str, _Use] = {}

    def add(self, number: int, request: NewRequest) -> None:
        """Count an accepted request."""
        use = self._uses.setdefault(request.tenant, _Use())
        use.responses.setdefault(_response_of(request), set()).add(number)
        use.sequences += request.num_sequences

    def remove(self, number: int, request: NewRequest) -> None:
        """Count a request no longer, which has ended."""
        use, response = self._uses[request.tenant], _response_of(request)
        use.responses[response].discard(number)
        use.sequences -= request.num_sequences
        if not use.responses[response]:
            del use.responses[response]
        if not use.responses:
            del self._uses[request.tenant]

    def refusal(self, request: NewRequest) -> str | None:
        """Why the tenant may not have this request too; None if it may."""
        use = self._uses.get(request.tenant)
        if use is None:
            return None
        new = _response_of(request) not in use.responses
        if request.most_requests is not None and new and len(use.responses) >= request.most_requests:
            return f"the key has {len(use.responses):,} unfinished requests in the fleet and may have {request.most_requests:,}"
        if request.most_sequences is not None and use.sequences + request.num_sequences > request.most_sequences:
            return (
                f"the key has {use.sequences:,} unfinished sequences in the fleet and may have {request.most_sequences:,}; "
                f"this request has {request.num_sequences:,}"
            )
        return None

    def numbers(self, response_id: str | None, tenant: str | None) -> list[int]:
        """Numbers of the unfinished requests of a response, or of all; of a tenant, or of all."""
        uses = [use for name, use in self._uses.items() if tenant in (None, name)]
        if response_id is None:
            found = [numbers for use in uses for numbers in use.responses.values()]
        else:
            found = [use.responses.get(response_id, set()) for use in uses]
        return sorted(number for numbers in found for number in numbers)

    def to_dict(self) -> dict[str, int]:
        """Unfinished sequences by tenant."""
        return {tenant: use.sequences for tenant, use in self._uses.items()}


def _response_of(request: NewRequest) -> str:
    """The id of the response that a prompt belongs to: that of the prompt without its number."""
    return request.request_id.rpartition(".")[0] or request.request_id
