"""How wrong variants are planted in the implementations, and the list of them all."""

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import ladder
import pytest
from ladder import Place

TAPS = ("test_logits.test_every_activation", ladder.check_taps)
LOGITS = ("test_logits.test_logits", ladder.check_logits)
GRADIENTS = ("test_gradients.test_gradients", ladder.check_gradients)
BACKWARD = ("test_operations.test_backward", ladder.check_backward)


@dataclass
class Site:
    """Where a variant is planted: the framework's modules, and pytest's patcher."""

    place: Place
    patch: Any

    def module(self, name: str) -> ModuleType:
        return importlib.import_module(name) if "." in name else self.place.module(name)

    def replace(self, target, attribute, new):
        """Put new(old) in the place of an attribute. target: a module's name, or an object."""
        owner = self.module(target) if isinstance(target, str) else target
        self.patch.setattr(owner, attribute, new(getattr(owner, attribute)))

    def operation(self, name, new):
        """Put new(old) in the place of an operation."""
        self.replace("native", name, new)


VARIANTS = []


def variant(title, framework, test, check, *arguments):
    """Register a planting function. test: the test of the ladder whose check this is."""

    def register(plant):
        marks = ladder.needs("numpy" if framework == "all three" else framework)
        name = f"{title} ({framework})"
        VARIANTS.append(pytest.param(title, framework, test, check, arguments, plant, id=name, marks=marks))
        return plant

    return register
