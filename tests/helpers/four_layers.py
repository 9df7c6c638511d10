"""`--experimental.custom_import four_layers`: flavors of that name, the first layers of others."""

import dataclasses

from torchtitan.models.deepseek_v3 import deepseekv3_args
from torchtitan.models.llama3 import llama3_args

for flavors, like in ((llama3_args, "8B"), (deepseekv3_args, "16B")):
    flavors["four_layers"] = dataclasses.replace(flavors[like], n_layers=4)
