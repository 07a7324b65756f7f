# POSEMBED_CUDA=ON_CPU, for tests without a GPU (make test-cuda-on-cpu): CUDA sources are compiled for the CPU, against
# the stand-in for the CUDA runtime, and operators take their CUDA half for tensors on the CPU.
function(posembed_run_cuda_on_cpu)
  set(folder ${PROJECT_SOURCE_DIR}/tests/cpp/cuda_on_cpu)
  get_target_property(sources posembed_kernels SOURCES)
  list(FILTER sources INCLUDE REGEX "\\.cu$")
  list(TRANSFORM sources PREPEND ${PROJECT_SOURCE_DIR}/csrc/)
  # -w: these sources are warned about where they are compiled for CUDA.
  set_source_files_properties(${sources} DIRECTORY ${PROJECT_SOURCE_DIR}/csrc PROPERTIES
    LANGUAGE CXX COMPILE_OPTIONS "-include;cuda_runtime.h;-w")
  target_sources(posembed PRIVATE ${folder}/launches.cpp)
  # Before csrc: some headers of csrc/dispatcher have another form here.
  target_include_directories(posembed_kernels BEFORE PRIVATE ${folder})
  target_include_directories(posembed BEFORE PRIVATE ${folder})
endfunction()
