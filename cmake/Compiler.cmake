# Build type, standard, compiler cache, and the flags of posembed's own code.

if(PROJECT_IS_TOP_LEVEL)
  if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
  endif()
  set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
  find_program(POSEMBED_CCACHE ccache)
  if(POSEMBED_CCACHE)
    # ccache takes files with precompiled headers only if it is told to.
    set(launcher ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros ${POSEMBED_CCACHE})
    foreach(language CXX CUDA)
      if(NOT CMAKE_${language}_COMPILER_LAUNCHER)
        set(CMAKE_${language}_COMPILER_LAUNCHER ${launcher})
      endif()
    endforeach()
  endif()
endif()

set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_EXTENSIONS OFF)

# Hidden symbols and warnings. Rotations must give the same bits on every instruction set and on CUDA, so neither
# compiler may fuse a multiplication and an addition by itself.
function(posembed_set_flags target)
  set_target_properties(${target} PROPERTIES
    CXX_VISIBILITY_PRESET hidden CUDA_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -ffp-contract=off>
    $<$<COMPILE_LANGUAGE:CUDA>:-fmad=false -Xcompiler=-Wall,-Wextra -Xfatbin=-compress-all>)
  if(POSEMBED_WARNINGS_AS_ERRORS)
    target_compile_options(${target} PRIVATE
      $<$<COMPILE_LANGUAGE:CXX>:-Werror>
      $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings -Xcompiler=-Werror>)
  endif()
endfunction()

# Compiles the sources of a folder as one translation unit, and precompiles the given headers: torch's headers, and the
# templates that they instantiate in each unit, take most of the time. Folders that an item of ${units} names share one.
function(posembed_unite_folders target)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  get_target_property(sources ${target} SOURCES)
  foreach(source IN LISTS sources)
    get_filename_component(unit ${source} DIRECTORY)
    foreach(together IN LISTS units)
      if(" ${together} " MATCHES " ${unit} ")
        string(REPLACE " " "_" unit ${together})
      endif()
    endforeach()
    set_source_files_properties(${source} PROPERTIES UNITY_GROUP "${target}_${unit}")
  endforeach()
  if(ARGN)
    target_precompile_headers(${target} PRIVATE ${ARGN})
  endif()
endfunction()

# Compiles every source once per instruction set, each time inside the namespace that POSEMBED_ISA names. Which copy
# runs is chosen by core/instruction_set.h. The flags do not change results: loops with square roots are vectorised only
# where these need not set errno, loops with arithmetic under a condition only where it cannot trap.
function(posembed_add_cpu_variants target)
  set(baseline_flags)
  set(avx2_flags -mavx2 -mfma -mf16c)
  set(avx512_flags ${avx2_flags} -mavx512f -mavx512bw -mavx512dq -mavx512vl)
  foreach(instruction_set ${POSEMBED_BUILT_SETS})
    set(variant ${target}_${instruction_set})
    add_library(${variant} OBJECT ${ARGN})
    posembed_set_flags(${variant})
    target_include_directories(${variant} PRIVATE $<TARGET_PROPERTY:${target},INCLUDE_DIRECTORIES>)
    target_compile_definitions(${variant} PRIVATE $<TARGET_PROPERTY:${target},COMPILE_DEFINITIONS>
                                                  POSEMBED_ISA=${instruction_set})
    target_compile_features(${variant} PRIVATE cxx_std_17)
    target_compile_options(${variant} PRIVATE -O3 -fno-math-errno -fno-trapping-math ${${instruction_set}_flags})
    # Objects, not members of an archive: callers name the copies by weak symbols, for which no member would be linked.
    target_sources(${target} INTERFACE $<TARGET_OBJECTS:${variant}>)
  endforeach()
endfunction()

# Sets POSEMBED_BUILT_SETS: the instruction sets for which CPU kernels are compiled, narrowest first.
function(posembed_choose_instruction_sets)
  if(NOT POSEMBED_INSTRUCTION_SETS MATCHES "^(all|native)$")
    message(FATAL_ERROR "POSEMBED_INSTRUCTION_SETS must be all or native, but is '${POSEMBED_INSTRUCTION_SETS}'.")
  endif()
  set(sets baseline)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    set(sets baseline avx2 avx512)
    if(POSEMBED_INSTRUCTION_SETS STREQUAL "native" AND NOT POSEMBED_TESTS)  # tests compare the sets
      _posembed_native_set(sets)
    endif()
  endif()
  set(POSEMBED_BUILT_SETS ${sets} PARENT_SCOPE)
endfunction()

function(_posembed_native_set result)
  execute_process(COMMAND ${CMAKE_CXX_COMPILER} -march=native -dM -E -x c++ /dev/null OUTPUT_VARIABLE macros)
  set(set avx512)
  foreach(feature AVX512F AVX512BW AVX512DQ AVX512VL)
    if(NOT macros MATCHES "__${feature}__")
      set(set avx2)
    endif()
  endforeach()
  foreach(feature AVX2 FMA F16C)
    if(NOT macros MATCHES "__${feature}__")
      set(set baseline)
    endif()
  endforeach()
  set(${result} ${set} PARENT_SCOPE)
endfunction()
