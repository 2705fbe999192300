"""File operations, and readers of JSON, pickles and archives, with bounds on time and memory.

file_operations      reads and writes of files, each with a time limit
memory_budget        Budget: a bound on the memory for the description of a checkpoint
box_reader           read_box: a box of a tensor that is stored in row-major order
json_text            JSON texts, read under the memory bound and sealed by their own SHA-256
json_values          Python values of a state, encoded as JSON and decoded
safetensors_header   read_header: names, dtypes, shapes and offsets in a safetensors file
unpickle             the data in a pickle, read without running the code in it
torch_archive        read_archive: the values and tensors in an archive of torch.save
"""
