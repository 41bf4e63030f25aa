"""The receipt of a response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastgen.receipt import (
    RECEIPT_VERSION,
    Receipt,
    ReceiptAnswer,
    ReceiptModel,
    ReceiptNumbers,
    ReceiptPrompt,
    engine_versions,
    shown_finish,
    shown_sampling,
)
from fastgen.server.openai.generation_request import GenerationRequest
from fastgen.server.serving.served_model import ServedModel
from fastgen.text.request_output import RequestOutput


@dataclass(frozen=True, slots=True)
class ReceiptWriter:
    """Writes the receipt of a response, whose model and formats it knows."""

    model: ReceiptModel
    numbers: ReceiptNumbers

    @classmethod
    async def of(cls, body: GenerationRequest, model: ServedModel, name: str) -> ReceiptWriter | None:
        """Return the writer for a request, or None if it asks for no receipt. The first one reads the model's files.

        Args:
            body: the request.
            model: the model to use.
            name: its name in the response.

        Raises:
            APIError: if the model's files cannot be read, or have changed since the server started.
        """
        if not body.receipt:
            return None
        files = await model.file_digests.get()
        return cls(ReceiptModel(name=name, files=files), ReceiptNumbers.of(model.engine.info))

    def write(self, outputs: Sequence[RequestOutput], num_choices: int) -> Receipt:
        """Return the receipt of finished outputs, `num_choices` for each prompt."""
        prompts = []
        for start in range(0, len(outputs), num_choices):
            first = outputs[start].request
            answers = [_answer(index, outputs[index]) for index in range(start, start + num_choices)]
            prompts.append(
                ReceiptPrompt(
                    token_ids=first.prompt_token_ids, sampling=shown_sampling(first.sampling), answers=answers
                )
            )
        unsigned = Receipt(
            version=RECEIPT_VERSION,
            model=self.model,
            engine=engine_versions(),
            numbers=self.numbers,
            prompts=prompts,
        )
        return unsigned.with_digest()


def _answer(index: int, output: RequestOutput) -> ReceiptAnswer:
    assert output.finish_reason is not None
    reason = output.stop_reason
    return ReceiptAnswer(
        index=index,
        seed=str(output.request.sampling.seed),
        token_ids=output.token_ids,
        finish_reason=shown_finish(output.finish_reason),
        stop_string=reason if isinstance(reason, str) else None,
    )
