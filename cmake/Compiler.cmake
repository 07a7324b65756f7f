# Build type, standard, compiler cache, and the flags of posembed's own code.

if(PROJECT_IS_TOP_LEVEL)
  if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
  endif()
  set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
  find_program(POSEMBED_CCACHE ccache)
  if(POSEMBED_CCACHE)
    foreach(language CXX CUDA)
      if(NOT CMAKE_${language}_COMPILER_LAUNCHER)
        set(CMAKE_${language}_COMPILER_LAUNCHER ${POSEMBED_CCACHE})
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

# Compiles every source once per instruction set, each time inside the namespace that POSEMBED_ISA names. Which copy
# runs is chosen by core/instruction_set.h. Neither flag changes results: loops with square roots are vectorised only
# where these need not set errno, loops with arithmetic under a condition only where it cannot trap.
function(posembed_add_cpu_variants target)
  set(baseline_flags)
  set(avx2_flags -mavx2 -mfma -mf16c)
  set(avx512_flags ${avx2_flags} -mavx512f -mavx512bw -mavx512dq -mavx512vl)
  set(instruction_sets baseline)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    list(APPEND instruction_sets avx2 avx512)
    target_compile_definitions(${target} PUBLIC POSEMBED_X86_VARIANTS)
  endif()
  if(NOT ARGN)
    return()
  endif()
  foreach(instruction_set ${instruction_sets})
    set(variant ${target}_${instruction_set})
    add_library(${variant} OBJECT ${ARGN})
    posembed_set_flags(${variant})
    target_include_directories(${variant} PRIVATE $<TARGET_PROPERTY:${target},INCLUDE_DIRECTORIES>)
    target_compile_definitions(${variant} PRIVATE $<TARGET_PROPERTY:${target},COMPILE_DEFINITIONS>
                                                  POSEMBED_ISA=${instruction_set})
    target_compile_features(${variant} PRIVATE cxx_std_17)
    target_compile_options(${variant} PRIVATE -O3 -fno-math-errno -fno-trapping-math ${${instruction_set}_flags})
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:${variant}>)
  endforeach()
endfunction()
