"""Formats of checkpoints: their readers, writers and checksums.

safetensors_file   safetensors files, written as a stream with checksums and read slice by slice
manifest           the JSON file that describes a checkpoint of this package
saved_state        HeldTensor, StateTable: the tensors and values of all ranks, merged by name
format_interface   Format: the interface of formats; MeshwrightFormat: the format of this package
checksum_file      checksums for formats that have none, in an additional file
file_check         check that the files of a checkpoint are unchanged
hub_format         HubFormat: whole tensors in safetensors files, with an index
dcp_reader         read_dcp: a checkpoint of torch.distributed.checkpoint
dcp_writer         DcpFormat: writer of checkpoints for torch.distributed.checkpoint
"""
