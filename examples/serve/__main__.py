"""`python examples/serve`: a tiny model with random weights over HTTP, to see an engine on pools of states.

    curl -d '{"text": "once upon a time", "tokens": 20}' localhost:8000/generate

Needs transformers for its tokenizer, and starlette and uvicorn: pip install transformers starlette uvicorn.
"""

import argparse
import threading

import torch
from engine import Engine, Request
from model import Model


class Worker:
    """An engine with a thread that takes its turns while there is something to do."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.wake = engine, threading.Condition()
        threading.Thread(target=self._turns, daemon=True).start()

    def run(self, request: Request) -> Request:
        """Waits for what comes of it."""
        self.engine.add(request)
        with self.wake:
            self.wake.notify()
        request.done.wait()
        return request

    def _turns(self) -> None:
        while True:
            with self.wake:
                self.wake.wait_for(lambda: not self.engine.is_idle())
            self.engine.turn()


def app(worker: Worker, tokenizer: object) -> object:
    """POST /generate {"text", "tokens"} -> {"text", "tokens"}."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def generate(call):
        given = await call.json()
        text, most = given.get("text"), given.get("tokens", 16)
        if not isinstance(text, str) or not text or not isinstance(most, int) or most < 1:
            said = 'expected {"text": a string that is not empty, "tokens": 1 or more}'
            return JSONResponse({"error": f"{said}; got {given}"}, status_code=400)
        prompt = tokenizer.encode(text, add_special_tokens=False)
        request = await run_in_threadpool(worker.run, Request(prompt, most, tokenizer.eos_token_id))
        return JSONResponse({"text": tokenizer.decode(request.output), "tokens": len(request.output)})

    return Starlette(routes=[Route("/generate", generate, methods=["POST"])])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python examples/serve", description=__doc__.partition("\n")[0])
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--rows", type=int, default=8, help="sequences at once")
    parser.add_argument("--guesses", type=int, default=3, help="tokens guessed a turn, 0 to 7")
    asked = parser.parse_args()
    import uvicorn
    from transformers import ByT5Tokenizer

    torch.manual_seed(0)
    tokenizer = ByT5Tokenizer()
    model = Model(len(tokenizer)).to("cuda" if torch.cuda.is_available() else "cpu")
    worker = Worker(Engine(model, asked.rows, asked.guesses))
    uvicorn.run(app(worker, tokenizer), port=asked.port)


if __name__ == "__main__":
    main()
