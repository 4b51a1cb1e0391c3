"""sections: DeepSpeed's JSON, one class for each of its objects."""
