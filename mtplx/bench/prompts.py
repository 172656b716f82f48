"""Prompts whose answers copy most of a given text."""

from __future__ import annotations

_HARBOUR = (
    "The harbour office opens at seven in the morning and closes at six in the evening. Boats"
    " longer than twelve metres must call the harbour master by radio before they enter."
    " Visitors pay at the blue kiosk beside the fuel dock, where a map of the free berths is"
    " kept up to date. Dogs are welcome on the eastern pier but not on the swimming beach."
)
_BREAD = (
    "Mix five hundred grams of flour with three hundred and fifty grams of water and let the"
    " dough rest for half an hour. Add ten grams of salt and a small spoon of yeast, then"
    " knead until it is smooth. Leave it covered overnight in a cool place. Bake it in a very"
    " hot oven for forty minutes, and wait until it has cooled before you cut the first slice."
)
_LETTER = (
    "Dear Ms Okafor, thank you for your letter of the third of March. The parcel with the"
    " spare parts left our warehouse on Monday and should reach you before the end of the"
    " week. We are sorry for the delay, which was caused by the storm. Please write to us"
    " again if anything is missing."
)
_CODE = (
    "def total_price(items, tax_rate):\n"
    "    subtotal = 0\n"
    "    for item in items:\n"
    "        subtotal += item.price * item.quantity\n"
    "    tax = subtotal * tax_rate\n"
    "    return subtotal + tax\n"
)
_PEOPLE = "Ada Lovelace, 1815; Alan Turing, 1912; Grace Hopper, 1906; Edsger Dijkstra, 1930"

COPY_PROMPTS = (
    f"Repeat the following text word for word:\n\n{_HARBOUR}",
    f"Correct the spelling mistakes in this text and change nothing else:\n\n"
    f"{_BREAD.replace('knead', 'knaed').replace('overnight', 'overnigth')}",
    f"Quote this letter exactly, in quotation marks:\n\n{_LETTER}",
    f"Write this text again with every sentence on its own line:\n\n{_HARBOUR}",
    f"Copy this Python function and rename nothing:\n\n{_CODE}",
    f"Write this letter again and correct its punctuation:\n\n{_LETTER.replace(',', '')}",
    f"Turn this recipe into a numbered list, with the same words:\n\n{_BREAD}",
    f"Rewrite this list with one person on each line:\n\n{_PEOPLE}",
)
