"""Generation of tokens by a marked, planned or plain model, with the numbers of one device.

_errors       GenerationError, EagerStepWarning
_uniform      uniform numbers for each seed, prompt, sample and step
_request      GenerationRequest: the checked arguments of a call
_choice       choice of a token from logits: temperature, top_k, top_p
_rows         the rows of a batch that a rank holds: logits in, tokens out
_cache        caches of transformers that are written in place
_pages        pages of a cache: the free ones, and those of each row
_calls        calls of a model: with a cache, as encoder and decoder, or on whole sequences
_ranks        generation on the ranks that a model is on
_decode_step  the step for one token as a module, with memory for all positions
_read_pages   the read of pages, with its sharding rule
_paged_step   the decode step with keys and values in pages
_step_runs    runs of decode steps: eager at first, then as a program
_slots        slots for rows, which prompts enter and leave
_paged_slots  slots whose keys and values are in pages
_slots_for    slots for a request
_slot_loop    the loop over tokens of rows in slots
_sampler      Sampler: the loop over tokens
"""

from ._choice import choose_tokens
from ._errors import EagerStepWarning, GenerationError
from ._request import GenerationRequest
from ._sampler import Generated, Sampler, sampler
from ._uniform import uniform

__all__ = [
    "EagerStepWarning",
    "Generated",
    "GenerationError",
    "GenerationRequest",
    "Sampler",
    "choose_tokens",
    "sampler",
    "uniform",
]
