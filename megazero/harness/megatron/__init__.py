"""megatron: the tasks of Megatron's ``tasks/main.py`` that score a language model as it is."""
