# Locates torch and makes targets of it without find_package(Torch), so that a torch with CUDA can be used on a machine
# without the CUDA toolkit. Installed beside PosEmbedConfig.cmake: building posembed and using it take the same path.
#
#   posembed_find_libtorch([REQUIRED] [HINTS folder...])
#     POSEMBED_TORCH_ROOT, POSEMBED_TORCH_VERSION, POSEMBED_TORCH_CUDA_MAJOR (empty: torch without CUDA)
#     PosEmbed::torch_cpu   headers and what a library of operators links
#     PosEmbed::libtorch    what a program links: also keeps torch's CUDA backend, which no symbol refers to
#     POSEMBED_TORCH_ERROR  why there is no torch; without REQUIRED the caller reports it

function(posembed_find_libtorch)
  cmake_parse_arguments(PARSE_ARGV 0 arg "REQUIRED" "" "HINTS")
  _posembed_torch_root("${arg_HINTS}" root)
  set(POSEMBED_TORCH_ROOT ${root} PARENT_SCOPE)
  if(NOT root)
    string(CONCAT error
      "posembed found no torch. Install it into a Python and name that Python, for example: "
      "python3 -m pip install torch, then cmake -DPOSEMBED_PYTHON=python3; "
      "or name the folder of a C++ LibTorch: cmake -DCMAKE_PREFIX_PATH=/path/to/libtorch")
    set(POSEMBED_TORCH_ERROR "${error}" PARENT_SCOPE)
    if(arg_REQUIRED)
      message(FATAL_ERROR "${error}")
    endif()
    return()
  endif()
  _posembed_torch_version(${root} version)
  _posembed_torch_cuda_major(${root} cuda_major)
  _posembed_torch_targets(${root} ${version})
  set(POSEMBED_TORCH_VERSION ${version} PARENT_SCOPE)
  set(POSEMBED_TORCH_CUDA_MAJOR "${cuda_major}" PARENT_SCOPE)
  set(POSEMBED_TORCH_ERROR "" PARENT_SCOPE)
endfunction()

# What the user names comes first (a folder of torch, a Python, else CMake's own ways to name a package), then hints, then
# any Python.
function(_posembed_torch_root hints result)
  set(candidates ${POSEMBED_TORCH})
  set(python ${POSEMBED_PYTHON})
  if(NOT python)
    string(REPLACE ":" ";" environment "$ENV{CMAKE_PREFIX_PATH}")
    foreach(folder IN LISTS Torch_DIR Torch_ROOT CMAKE_PREFIX_PATH environment)
      # A prefix; or torch.utils.cmake_prefix_path, which is <prefix>/share/cmake; or <prefix>/share/cmake/Torch.
      list(APPEND candidates ${folder} ${folder}/../.. ${folder}/../../..)
    endforeach()
    list(APPEND candidates ${hints})
    find_program(python NAMES ${Python3_EXECUTABLE} ${Python_EXECUTABLE} python3 NO_CACHE)
  endif()
  if(python)
    _posembed_package_of_python("${python}" torch root)
    list(APPEND candidates ${root})
  endif()

  set(${result} "" PARENT_SCOPE)
  foreach(root IN LISTS candidates)
    if(EXISTS "${root}/lib/libtorch_cpu.so" AND EXISTS "${root}/include/torch")
      file(REAL_PATH ${root} root)
      set(${result} "${root}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
endfunction()

# Asks an interpreter for a package's folder without importing it, which takes seconds for torch.
function(_posembed_package_of_python python package result)
  execute_process(
    COMMAND ${python} -c "import importlib.util as u; s = u.find_spec('${package}'); print(s.submodule_search_locations[0] if s else '')"
    OUTPUT_VARIABLE folder OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  set(${result} "${folder}" PARENT_SCOPE)
endfunction()

function(_posembed_torch_version root result)
  file(STRINGS ${root}/include/torch/headeronly/version.h lines REGEX "TORCH_VERSION_(MAJOR|MINOR|PATCH) [0-9]+")
  list(TRANSFORM lines REPLACE ".* ([0-9]+)$" "\\1")
  list(JOIN lines "." version)
  set(${result} ${version} PARENT_SCOPE)
endfunction()

# The CUDA runtime that c10_cuda was linked to tells the major version, in wheels and in C++ LibTorch alike.
function(_posembed_torch_cuda_major root result)
  set(major "")
  if(EXISTS ${root}/lib/libc10_cuda.so)
    file(STRINGS ${root}/lib/libc10_cuda.so runtime REGEX "libcudart\\.so\\.[0-9]+" LIMIT_COUNT 1)
    string(REGEX REPLACE ".*libcudart\\.so\\.([0-9]+).*" "\\1" major "${runtime}")
  endif()
  set(${result} "${major}" PARENT_SCOPE)
endfunction()

function(_posembed_torch_targets root version)
  if(TARGET PosEmbed::libtorch)
    return()
  endif()
  set(standard 17)
  if(version VERSION_GREATER_EQUAL 2.13)
    set(standard 20)  # as its own CMake package asks; those of later versions need it
  endif()
  # GLOBAL: with add_subdirectory the targets are also needed in the folder above.
  add_library(PosEmbed::c10 SHARED IMPORTED GLOBAL)
  set_target_properties(PosEmbed::c10 PROPERTIES IMPORTED_LOCATION ${root}/lib/libc10.so)
  add_library(PosEmbed::torch_cpu SHARED IMPORTED GLOBAL)
  set_target_properties(PosEmbed::torch_cpu PROPERTIES IMPORTED_LOCATION ${root}/lib/libtorch_cpu.so)
  target_include_directories(PosEmbed::torch_cpu INTERFACE
    ${root}/include ${root}/include/torch/csrc/api/include)
  target_compile_features(PosEmbed::torch_cpu INTERFACE cxx_std_${standard})
  target_link_libraries(PosEmbed::torch_cpu INTERFACE PosEmbed::c10)
  # Programs that also use find_package(Torch) are linked with the toolkit's folder, whose NCCL may be older than torch's.
  file(GLOB nvidia_folders ${root}/../nvidia/*/lib)
  list(TRANSFORM nvidia_folders PREPEND -Wl,-rpath-link,)
  add_library(PosEmbed::libtorch INTERFACE IMPORTED GLOBAL)
  target_link_options(PosEmbed::libtorch INTERFACE ${nvidia_folders})
  target_link_libraries(PosEmbed::libtorch INTERFACE PosEmbed::torch_cpu
    -Wl,--push-state,--no-as-needed,${root}/lib/libtorch.so,--pop-state)
endfunction()
