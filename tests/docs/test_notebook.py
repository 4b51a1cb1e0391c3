"""Notebooks become pages that load nothing."""

from __future__ import annotations

import json

from scripts.docs_notebook import notebook_page


def test_text_code_and_what_it_showed() -> None:
    picture = {"output_type": "display_data", "data": {"image/png": ["aGk=\n"], "text/plain": "<Figure>"}}
    cells = [
        {"cell_type": "markdown", "source": ["# Plan\n", "\n", "On paper."]},
        {
            "cell_type": "code",
            "source": "print(1)\n1 + 1",
            "outputs": [
                {"output_type": "stream", "text": ["1\n"]},
                {"output_type": "execute_result", "data": {"text/plain": "2"}},
                picture,
                {"output_type": "error", "ename": "E", "evalue": "", "traceback": []},
            ],
        },
        {"cell_type": "code", "source": " ", "outputs": []},
        {"cell_type": "raw", "source": "no page has it"},
    ]
    assert notebook_page(json.dumps({"nbformat": 4, "cells": cells})) == (
        "# Plan\n\nOn paper.\n\n"
        "````python\nprint(1)\n1 + 1\n````\n\n````text\n1\n````\n\n````text\n2\n````\n\n"
        "![picture](data:image/png;base64,aGk=)\n"
    )
