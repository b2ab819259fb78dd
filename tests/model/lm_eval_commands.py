"""Runs several commands of lm_eval in one process: its imports alone take longer than most of them.

Usage: python tests/model/lm_eval_commands.py JSON, a list of argument lists.
"""

import json
import sys

from lm_eval.__main__ import cli_evaluate

if __name__ == "__main__":
    commands = json.loads(sys.argv[1])
    for command in commands:
        sys.argv = ["lm_eval", *command]
        cli_evaluate()
