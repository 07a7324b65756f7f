# posembed_cuda_on_cpu: libposembed.so for make test-cuda-on-cpu. Operators are those of libposembed.so itself; they take
# their CUDA half for every tensor, with the CUDA kernels' sources compiled for the CPU.
if(NOT POSEMBED_WITH_CUDA)
  add_custom_target(posembed_cuda_on_cpu
    COMMAND ${CMAKE_COMMAND} -E rm -f ${CMAKE_CURRENT_BINARY_DIR}/libposembed.so  # of a build with CUDA, earlier
    COMMAND ${CMAKE_COMMAND} -E echo "posembed is built without CUDA kernels")
  return()
endif()

get_target_property(kernels posembed_kernels SOURCES)
list(FILTER kernels INCLUDE REGEX "\\.cu$")
list(TRANSFORM kernels PREPEND ${PROJECT_SOURCE_DIR}/csrc/)
# In this folder alone. -w: they are warned about where they are compiled for CUDA.
set_source_files_properties(${kernels} PROPERTIES LANGUAGE CXX COMPILE_OPTIONS "-include;cuda_runtime.h;-w")

add_library(posembed_cuda_on_cpu SHARED EXCLUDE_FROM_ALL
  cuda_scope.cpp launches.cpp ${kernels}
  $<FILTER:$<TARGET_OBJECTS:posembed_kernels>,INCLUDE,/c_interface/>  # no operator refers to it
  $<FILTER:$<TARGET_OBJECTS:posembed>,EXCLUDE,dispatcher/cuda_scope\\.cpp>)
set_target_properties(posembed_cuda_on_cpu PROPERTIES OUTPUT_NAME posembed)
posembed_set_flags(posembed_cuda_on_cpu)
target_include_directories(posembed_cuda_on_cpu PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
# Kernels that are defined here already are not taken from the archive.
target_link_libraries(posembed_cuda_on_cpu PRIVATE posembed_kernels PosEmbed::torch_cpu nlohmann_json::nlohmann_json)
target_link_options(posembed_cuda_on_cpu PRIVATE $<TARGET_PROPERTY:posembed,LINK_OPTIONS>)
