"""LangGraph: a graph with a SQLite checkpointer and `durability="sync"`; the approval is an
interrupt. Invoked without an input, it goes on from the last checkpoint.

usage: langgraph_program.py begin|recover FOLDER
"""

import json
import sys
from typing import TypedDict

import ledger
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt

MODE, FOLDER = sys.argv[1:]
CONFIG = {"configurable": {"thread_id": "order-1"}}


class Order(TypedDict, total=False):
    amount: int
    approved: bool
    receipt: str


def model(order: Order) -> Order:
    return {"amount": 10}


def approval(order: Order) -> Order:
    return {"approved": bool(interrupt({"charge": order["amount"]}))}


def charge(order: Order) -> Order:
    return {"receipt": ledger.charge(order["amount"])}


builder = StateGraph(Order)
for node in (model, approval, charge):
    builder.add_node(node.__name__, node)
builder.add_edge(START, "model")
builder.add_edge("model", "approval")
builder.add_conditional_edges("approval", lambda order: "charge" if order["approved"] else END)
builder.add_edge("charge", END)

with SqliteSaver.from_conn_string(f"{FOLDER}/langgraph.sqlite") as saver:
    graph = builder.compile(checkpointer=saver)
    if MODE == "begin":
        graph.invoke({}, CONFIG, durability="sync")
        graph.invoke(Command(resume=True), CONFIG, durability="sync")
    else:
        graph.invoke(None, CONFIG, durability="sync")
        state = graph.get_state(CONFIG)
        nodes = [task.name for past in graph.get_state_history(CONFIG) for task in past.tasks]
        seen = f"next={state.next}; history {', '.join(reversed(nodes))}"
        print(json.dumps({"state": "ended" if not state.next else "stopped", "seen": seen}))
