"""Let a trained model go on with a text.

python examples/write.py runs/demo/apollo/model "Dorothy"
"""

import logging
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

folder, beginning = sys.argv[1:]
logging.disable(logging.WARNING)
disable_progress_bar()
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
torch.manual_seed(0)
tokens = tokenizer(beginning, return_tensors="pt")["input_ids"]
written = model.generate(tokens, max_new_tokens=120, do_sample=True, temperature=0.6, top_k=40, pad_token_id=0)
print(tokenizer.decode(written[0], skip_special_tokens=True))
