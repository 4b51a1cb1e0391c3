"""x"""
class MockBERTDataset: pass
