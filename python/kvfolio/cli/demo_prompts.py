"""What the demo asks."""

from __future__ import annotations

from dataclasses import dataclass

SUPPORT_DESK = """\
You are the support assistant of Northwind Outdoor, a shop for tents, sleeping bags, stoves and rucksacks.
Answer in plain English, in at most four sentences, and never invent a product, a price or a date.

Shop facts you may rely on:
- Orders placed before 14:00 on a working day leave the warehouse the same day. Standard delivery takes two
  to four working days; express delivery takes one working day and costs 9.90.
- Unused goods may be returned within 60 days, in their packaging, with the return label from the parcel.
  The refund is paid to the original means of payment within five working days after it has arrived.
- Tents carry a warranty of five years on poles, zips and seams. Sleeping bags and rucksacks carry two years,
  stoves ten. Damage by fire, by pets or by washing machines is not covered.
- The repair workshop mends poles, zips, straps and small tears. It gives an estimate before it starts, and
  needs about two weeks. Spare poles and pegs are sold singly.
- Gas cartridges cannot be sent by air and cannot be returned. Stoves that have been lit count as used.
- The shop in Harbour Street is open from Monday to Saturday, 10:00 to 18:30. Staff there lend tents for a
  weekend and deduct the fee from a later purchase.

How to answer: first say what the customer can do now, then give the rule it follows from. If the facts above
do not settle the question, say so and give the telephone number of the shop, 555 0142. Do not apologize more
than once. If a customer reports an injury or a gas leak, tell them to close the valve, to air the room and to
call the number at once, before anything else."""


@dataclass(frozen=True)
class DemoPrompt:
    """One question, and how it is to be answered."""

    question: str
    system: str | None = None
    samples: int = 1  # above 1: sampled, by fork of the one prompt; else greedy


PROMPTS = [
    DemoPrompt("A pole of my tent broke after three years. What can I do?", SUPPORT_DESK),
    DemoPrompt("Explain in two sentences why the sky is blue."),
    DemoPrompt("I would like to send back a stove that I have used once. Is that possible?", SUPPORT_DESK),
    DemoPrompt("Write a short poem about a lighthouse in winter.", samples=3),
    DemoPrompt("How long does express delivery take, and what does it cost?", SUPPORT_DESK),
    DemoPrompt("What is the difference between a list and a tuple in Python?"),
    DemoPrompt("My rucksack strap is torn. Do you repair it, and how long does that take?", SUPPORT_DESK),
    DemoPrompt("Suggest a name for a small bakery that sells only rye bread.", samples=3),
    DemoPrompt("Give me three tips for learning to read sheet music."),
    DemoPrompt("When is the shop open on Saturday, and can I borrow a tent there?", SUPPORT_DESK),
    DemoPrompt("Summarize the story of Romeo and Juliet in three sentences."),
    DemoPrompt("A train leaves at 9:40 and arrives at 12:05. How long is the journey? Show your working."),
    DemoPrompt("Translate into French: The library opens at nine and closes at six."),
]
