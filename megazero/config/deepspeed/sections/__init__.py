"""sections: DeepSpeed's JSON, one pydantic model for each of its objects."""
