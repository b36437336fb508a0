"""Durable steps without the agent loop: any coroutine, made a step of a run.

python examples/steps.py          # twice: the second time nothing is called
"""

import asyncio

from runfold import FileStore, Journal, start

STORE = FileStore("runs")


async def price() -> int:
    print("asking for the price")
    return 120


async def pay() -> str:
    print("paying")
    return "receipt-1"


async def main() -> None:
    await start(STORE, "shop", {"item": "chair"}, run_id="order-1")
    async with await Journal.open(STORE, "order-1", is_write=lambda tool: tool == "pay") as journal:
        amount = await journal.run_step("price", "tool", price, tool="price")
        receipt = await journal.run_step("pay", "tool", pay, tool="pay", input={"amount": amount})
    print(f"paid {amount}: {receipt}")


asyncio.run(main())
