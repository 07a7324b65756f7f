# nlohmann/json, headers only, used inside libposembed and never by its users: the system's package, else a folder
# (NLOHMANN_JSON_ROOT, an option or an environment variable; for machines without network), else the PyPI package, which
# the building interpreter has or fetches into the build folder, else a download.
find_package(nlohmann_json 3.10 CONFIG QUIET)
if(NOT TARGET nlohmann_json::nlohmann_json)
  set(json_folders ${NLOHMANN_JSON_ROOT} $ENV{NLOHMANN_JSON_ROOT})
  if(POSEMBED_PYTHON)
    _posembed_package_of_python(${POSEMBED_PYTHON} nlohmann_json json_package)
    list(APPEND json_folders ${json_package})
    set(json_fetched ${PROJECT_BINARY_DIR}/nlohmann_json)
    if(NOT json_folders AND NOT EXISTS ${json_fetched})
      execute_process(COMMAND ${POSEMBED_PYTHON} -m pip install --quiet --disable-pip-version-check --no-deps
                              --target ${json_fetched} nlohmann-json==3.12.0 OUTPUT_QUIET ERROR_QUIET)
    endif()
    list(APPEND json_folders ${json_fetched}/nlohmann_json)
  endif()
  find_path(json_include nlohmann/json.hpp PATHS ${json_folders} PATH_SUFFIXES include NO_DEFAULT_PATH NO_CACHE)
  if(json_include)
    add_library(nlohmann_json::nlohmann_json INTERFACE IMPORTED GLOBAL)
    target_include_directories(nlohmann_json::nlohmann_json INTERFACE ${json_include})
  else()
    include(FetchContent)
    FetchContent_Declare(nlohmann_json
      GIT_REPOSITORY https://github.com/nlohmann/json.git GIT_TAG v3.12.0 GIT_SHALLOW ON)
    set(JSON_SystemInclude ON)
    FetchContent_MakeAvailable(nlohmann_json)
  endif()
endif()
