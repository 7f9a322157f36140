"""Made-up notes of three hospitals, for tests and demos: texts that need no download.

A note is some words of its ward among words that all wards use, and now and then one of another ward.
"""

from __future__ import annotations

import numpy as np

from fedkeep.data.sources import text_columns
from fedkeep.data.sources.common import Options, Part, Raw, hold_out

WARDS = {
    "cardiology": "chest pain heart pulse rhythm stent valve pressure murmur artery beta blocker echo palpitations",
    "neurology": "headache seizure stroke reflex tremor memory vision numb speech migraine dizzy gait nerve aura",
    "orthopaedics": "knee hip fracture cast joint fall shoulder swelling plate sprain bone crutches tendon ankle",
    "respiratory": "cough asthma lung breath wheeze inhaler oxygen smoker sputum infection chest fever airway steroid",
}
_EVERYWHERE = (
    "patient reports since days mild severe no known history follow up scan plan review today was admitted with"
)
_NOTES = 1_500
_SHARES = ((0.55, 0.25, 0.1, 0.1), (0.1, 0.2, 0.6, 0.1), (0.15, 0.2, 0.15, 0.5))  # of the wards in each hospital


def read_wards(options: Options) -> Raw:
    """Return 1,500 notes of four wards, with the hospital of each as its owner; a fifth is for testing."""
    options.reject_except("wards", "tokenizer", "max_length")
    texts, y, hospital = make_notes()
    x = text_columns.tokenise("wards", "note", texts, options)
    return hold_out(Raw(Part(x, y, hospital), None, "wards", len(WARDS), class_names=list(WARDS)), 0.2)


def make_notes() -> tuple[list[str], np.ndarray, np.ndarray]:
    """Return the notes, the ward and the hospital of each; always the same ones."""
    rng = np.random.default_rng(12)
    own, common = [words.split() for words in WARDS.values()], _EVERYWHERE.split()
    hospital = np.arange(_NOTES) % len(_SHARES)
    wards = np.array([rng.choice(len(own), p=_SHARES[h]) for h in hospital])
    notes = []
    for ward in wards:
        words = [*rng.choice(common, rng.integers(3, 12)), *rng.choice(own[ward], rng.integers(1, 4))]
        words += [rng.choice(own[other]) for other in rng.choice(len(own), rng.integers(0, 3))]
        notes.append(" ".join(rng.permutation(words)))
    return notes, wards, hospital
